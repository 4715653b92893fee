"""Properties of a dataset that stages need: length limits, row order, validation rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.config.prepare import PROMPT_TOKENS
from xray_runtime.config.sft import REPLY_TOKENS
from xray_runtime.data.pairs import HELDOUT, TRAIN, VALIDATION, PreferenceExample
from xray_runtime.data.tokens import Read, Report, Tokens
from xray_runtime.models.causal_lm import max_positions

if TYPE_CHECKING:
    from xray_runtime.graph.kind import Recorder, Stage


def is_in_order(dataset: Path) -> bool:
    """Whether training conversations must be read in order, because the dataset has a curriculum."""
    return bool(json.loads((dataset / "dataset.json").read_text()).get("in_order"))


def max_prompt_tokens(dataset: Path, model: Path, reply_tokens: int) -> int:
    """The longest prompt that stages use, in tokens: `data.max_prompt_tokens`, or else `PROMPT_TOKENS`, but no more
    than the context of `model` leaves for a reply of `reply_tokens`.

    Raises:
        ValueError: the context is too short.
    """
    given, context = json.loads((dataset / "dataset.json").read_text())["max_prompt_tokens"], max_positions(model)
    if given is not None:
        return int(given)
    limit = PROMPT_TOKENS if context is None else min(PROMPT_TOKENS, context - reply_tokens)
    if limit < 1:
        raise ValueError(f"replies of {reply_tokens} tokens are not allowed: the model's context has {context} tokens")
    return limit


def max_reply_tokens(given: int | None, model: Path) -> int:
    """The longest reply that is trained on: `given`, or else `REPLY_TOKENS`, but no more than a third of the context of
    `model`."""
    context = max_positions(model)
    return given or (REPLY_TOKENS if context is None else min(REPLY_TOKENS, max(context // 3, 2)))


def validation_file(stage: str, dataset: Path) -> Path:
    """A dataset's validation rows. Raises ValueError if it has none."""
    if not (dataset / VALIDATION).exists():
        raise ValueError(f"{stage}.validation: the dataset has no validation rows: set data.validation_fraction")
    return dataset / VALIDATION


def preference_tokens(
    stage: Stage[Any, Any], dataset: Path, tokenizer: Any, recorder: Recorder, read: Read = "replies"
) -> tuple[Tokens, Tokens]:
    """The tokens of the pairs to train on, and of the held-out ones."""
    given = PreferenceExample, tokenizer, stage.seal, tokenizing(recorder), read
    return Tokens(dataset / TRAIN, *given), Tokens(dataset / HELDOUT, *given)


def tokenizing(recorder: Recorder) -> Report:
    """Progress callback for `Tokens`."""
    return lambda done, total: recorder.progress(done, total, "pairs", "tokenizing")
