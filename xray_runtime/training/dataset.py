"""What stages read of their dataset beside its rows: limits of length, the order, the validation side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.config.prepare import PROMPT_TOKENS
from xray_runtime.config.sft import REPLY_TOKENS
from xray_runtime.data.pairs import VALIDATION
from xray_runtime.data.tokens import Report
from xray_runtime.models.causal_lm import max_positions

if TYPE_CHECKING:
    from xray_runtime.graph.kind import Recorder


def is_in_order(dataset: Path) -> bool:
    """Whether training conversations are to be read in their order: the dataset has a curriculum."""
    return bool(json.loads((dataset / "dataset.json").read_text()).get("in_order"))


def max_prompt_tokens(dataset: Path, model: Path, reply_tokens: int) -> int:
    """The longest prompt that stages take from a dataset, in tokens: `data.max_prompt_tokens`, or `PROMPT_TOKENS`, or
    what the context of `model` leaves beside a reply of `reply_tokens` where that is less.

    Raises:
        ValueError: it leaves nothing.
    """
    given, context = json.loads((dataset / "dataset.json").read_text())["max_prompt_tokens"], max_positions(model)
    if given is not None:
        return int(given)
    limit = PROMPT_TOKENS if context is None else min(PROMPT_TOKENS, context - reply_tokens)
    if limit < 1:
        raise ValueError(f"replies of {reply_tokens} tokens are not allowed: the model's context holds {context}")
    return limit


def max_reply_tokens(given: int | None, model: Path) -> int:
    """The longest reply that is learned: `given`, or `REPLY_TOKENS`, or a third of the context of `model` where that is
    less."""
    context = max_positions(model)
    return given or (REPLY_TOKENS if context is None else min(REPLY_TOKENS, max(context // 3, 2)))


def validation_file(stage: str, dataset: Path) -> Path:
    """The rows of a dataset that versions of a policy are chosen by. Raises ValueError where it has none."""
    if not (dataset / VALIDATION).exists():
        raise ValueError(f"{stage}.validation: the dataset has no rows for it: set data.validation_fraction")
    return dataset / VALIDATION


def tokenizing(recorder: Recorder) -> Report:
    """For `Tokens`: shows how far a dataset is tokenized."""
    return lambda done, total: recorder.progress(done, total, "pairs", "tokenizing")
