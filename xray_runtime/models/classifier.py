"""A Hugging Face sequence-classification model with one label, seen as a causal LM with a scalar head.

The trunk is the same; `score.weight` becomes the head. The output layer, which such a model lacks and a reward model
never uses, is tied to the embeddings, so that it takes no memory.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
import transformers
from torch import nn

from xray_runtime.data.batch import TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.store.location import NO_CODE, locate
from xray_runtime.models.causal_lm import complete_tokenizer, load_reported, unloadable, without_weights
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.reward_objective import RewardObjective
from xray_runtime.models.source_checks import ForeignModelError, check_config, check_no_adapter
from xray_runtime.models.trial import only_computed_options

ALLOWED = "must be a sequence-classification model with one label, on a causal trunk that transformers knows"
TRIED_TOKENS, RELATIVE, ABSOLUTE = 8, 1e-3, 1e-4
"""A row that both forms score once, and how far they may differ, in float32."""


def load_classifier(model: str, field: str) -> tuple[HeadedLM, Any]:
    """(reward model, tokenizer) in float32, from a hub name or a directory; errors begin with the config's `field`.

    Raises:
        ValueError: `model` cannot be found, or not be loaded without running code of its own, or gives no single score
            a text, or its tokenizer lacks what conversations need. One line.
    """
    name, gguf = locate(model, field)
    if gguf:
        _refuse(field, model, "is a GGUF file, which has no score head")
    try:
        check_no_adapter(name)
        config = transformers.AutoConfig.from_pretrained(name, **NO_CODE)
        check_config(config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **NO_CODE)
    except ForeignModelError as error:
        _refuse(field, model, str(error), error)
    except Exception as error:
        raise unloadable(field, model, error) from error
    kind = (config.architectures or [""])[0]
    if kind and not kind.endswith("ForSequenceClassification"):
        _refuse(field, model, f"is a {kind}")
    if config.num_labels != 1:
        _refuse(field, model, f"has {config.num_labels} labels")
    try:
        classifier, report = load_reported(transformers.AutoModelForSequenceClassification, name)
    except Exception as error:
        raise unloadable(field, model, error) from error
    for problem, why in (("missing_keys", "has no weights for"), ("unexpected_keys", "has weights that it lacks:")):
        # An output layer of the language model it was made from takes no part in a score.
        if names := [name for name in report[problem] if not name.startswith("lm_head.")]:
            _refuse(field, model, f"{why} {min(names)}")
    complete_tokenizer(tokenizer, field, model)
    try:
        reward = as_reward_model(classifier.eval())
    except ValueError as error:
        _refuse(field, model, str(error), error)
    return reward, tokenizer


def as_reward_model(classifier: Any) -> HeadedLM:
    """A reward model that shares the trunk of `classifier`.

    Raises:
        ValueError: it has no linear score head, or no causal LM has its trunk, or the two do not give the same scores.
    """
    name, score = type(classifier).__name__, getattr(classifier, "score", None)
    hidden = getattr(classifier.config, "hidden_size", None)
    if not isinstance(score, nn.Linear) or score.weight.shape != (1, hidden):
        raise ValueError(f"is a {name}, which has no linear score head")
    config = copy.deepcopy(classifier.config)
    config.tie_word_embeddings = True
    try:
        lm = without_weights(config)
    except ValueError as error:
        raise ValueError(f"is a {name}, and there is no causal language model of this family") from error
    if type(lm.base_model) is not type(classifier.base_model):
        raise ValueError(f"is a {name}, whose trunk is not that of a {type(lm).__name__}")
    expected = _own_score(classifier)
    setattr(lm, lm.base_model_prefix, classifier.base_model)
    lm.tie_weights()
    if any(parameter.is_meta for parameter in lm.parameters()):
        raise ValueError(f"is a {name}, and the output layer of a {type(lm).__name__} cannot be tied to its embeddings")
    reward = HeadedLM(lm, scalar_head=True)
    assert reward.scalar is not None
    with torch.no_grad():
        reward.scalar.weight.copy_(score.weight)
        if score.bias is not None:
            reward.scalar.bias.copy_(score.bias)
    reward.eval()
    with torch.no_grad():
        found = RewardObjective().score(reward, _tried(classifier)).scores
    if not torch.allclose(torch.as_tensor(found), expected, rtol=RELATIVE, atol=ABSOLUTE):
        raise ValueError(f"is a {name}, which does not score the last token of a causal trunk")
    return reward


def _tried(classifier: Any) -> TextBatch[torch.Tensor]:
    """A row, whose score is read at its last token."""
    padding = classifier.config.pad_token_id
    ids = torch.tensor([i for i in range(3, TRIED_TOKENS + 4) if i != padding][:TRIED_TOKENS])
    return TextBatch(input_ids=Ragged(ids, torch.tensor([0, TRIED_TOKENS])))


@torch.no_grad()
def _own_score(classifier: Any) -> torch.Tensor:
    """The score [1] of the tried row under the attention of the model's authors. Raises OtherModelError: ours has not
    all of its options."""
    ids = _tried(classifier).input_ids.values[None]
    with only_computed_options():
        classifier(input_ids=ids)
    attention = classifier.config._attn_implementation
    classifier.set_attn_implementation("eager")
    score: torch.Tensor = classifier(input_ids=ids).logits[:, 0]
    classifier.set_attn_implementation(attention)
    return score


def _refuse(field: str, model: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(f"{field}: {model!r} is not allowed: it {why}; {ALLOWED}") from cause
