"""A Hugging Face sequence-classification model with one label, seen as a causal LM with a scalar head.

The trunk is the same; `score.weight` becomes the head. The output layer, which such a model lacks and a reward model
never uses, is tied to the embeddings, so that it takes no room.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
import transformers
from torch import nn

from xray_runtime.models.causal_lm import complete_tokenizer, load_weights, unloadable, without_weights
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.reward_objective import RewardObjective
from xray_runtime.store.location import NO_CODE, locate

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
        config = transformers.AutoConfig.from_pretrained(name, **NO_CODE)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **NO_CODE)
    except Exception as error:
        raise unloadable(field, model, error) from error
    kind = (config.architectures or [""])[0]
    if kind and not kind.endswith("ForSequenceClassification"):
        _refuse(field, model, f"is a {kind}")
    if config.num_labels != 1:
        _refuse(field, model, f"has {config.num_labels} labels")
    try:
        classifier, missing = load_weights(transformers.AutoModelForSequenceClassification, name)
    except Exception as error:
        raise unloadable(field, model, error) from error
    if missing is not None:
        _refuse(field, model, f"has no weights for {missing}")
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
    if not _equal_scores(classifier, reward):
        raise ValueError(f"is a {name}, which does not score the last token of a causal trunk")
    return reward


def _equal_scores(classifier: Any, reward: HeadedLM) -> bool:
    """Whether both give a row the same score, where ours is read at its last token."""
    padding = classifier.config.pad_token_id
    ids = torch.tensor([[i for i in range(3, TRIED_TOKENS + 4) if i != padding][:TRIED_TOKENS]])
    rows = {"input_ids": ids[0], "lengths": torch.tensor([TRIED_TOKENS])}
    with torch.no_grad():
        ours, theirs = RewardObjective().score(reward, rows)["scores"], classifier(input_ids=ids).logits[:, 0]
    assert isinstance(ours, torch.Tensor)
    return torch.allclose(ours, theirs, rtol=RELATIVE, atol=ABSOLUTE)


def _refuse(field: str, model: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(f"{field}: {model!r} is not allowed: it {why}; {ALLOWED}") from cause
