"""Properties of a dataset that stages need: length limits, row order, validation rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.pairs import HELDOUT, TRAIN, VALIDATION, Pairs, PreferenceExample
from xray_runtime.data.tokens import Read, Report, Tokens
from xray_runtime.methods.prepare.config import PROMPT_TOKENS
from xray_runtime.methods.sft.config import REPLY_TOKENS
from xray_runtime.models.causal_lm import max_positions

if TYPE_CHECKING:
    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.graph.kind import Recorder

TOO_LONG = "longer_than_context"
"""Reason to leave out a pair."""


def is_in_order(dataset: Path) -> bool:
    """Whether training conversations must be read in order, because the dataset has a curriculum."""
    return bool(json.loads((dataset / "dataset.json").read_text()).get("in_order"))


def max_prompt_tokens(dataset: Path, model: Path, reply_tokens: int) -> int:
    """The longest prompt that stages use, in tokens: `data.max_prompt_tokens`, but no more than the context of `model`
    leaves for a reply of `reply_tokens`; `PROMPT_TOKENS` where neither is known.

    Raises:
        ValueError: the context is too short.
    """
    given, context = json.loads((dataset / "dataset.json").read_text())["max_prompt_tokens"], max_positions(model)
    limits = [limit for limit in (given, None if context is None else context - reply_tokens) if limit is not None]
    limit = min(limits, default=PROMPT_TOKENS)
    if limit < 1:
        raise ValueError(f"replies of {reply_tokens} tokens are not allowed: the model's context has {context} tokens")
    return int(limit)


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


def check_longest(
    stage: Stage[Any, Any],
    spec: ModelSpec,
    lengths: np.ndarray,
    id_of: Callable[[int], str],
    *,
    reply_tokens: int = 0,
    field: str = "engine",
) -> None:
    """Check that a Workhorse of `spec` can train on the longest row.

    Args:
        lengths: tokens of each row.
        id_of: row → its name in the dataset.
        reply_tokens: of the longest reply that is yet to be sampled.
        field: the section with the model's layout.

    Raises:
        ValueError: it cannot; one line names the row, and what would hold it.
    """
    if not lengths.size:  # other checks say so
        return
    row = int(lengths.argmax())
    found = stage.too_long(spec, int(lengths[row]) + reply_tokens)
    if found is not None:
        with_reply = f", with a reply of {reply_tokens:,}," if reply_tokens else ""
        raise ValueError(f"{stage.name}.{field}: row {id_of(row)!r}{with_reply} {found}")


def list_dropped(out: Path, *sides: Tokens) -> None:
    """Write dropped.jsonl, if any pair of these sides was left out."""
    if any(side.num_dropped for side in sides):
        with DroppedRows(out) as dropped:
            for side in sides:
                side.list_dropped(dropped)


def preference_tokens(
    stage: Stage[Any, Any],
    dataset: Path,
    tokenizer: Tokenizer,
    out: Path,
    recorder: Recorder,
    model: Path,
    read: Read = "replies",
) -> tuple[Tokens, Tokens]:
    """The tokens of the pairs to train on, and of the held-out ones, as far as both sides fit the context of `model`;
    the others are listed in `out`.

    Raises:
        ValueError: no pair of one side fits.
    """
    paths, context = (dataset / TRAIN, dataset / HELDOUT), max_positions(model)
    given = PreferenceExample, tokenizer, stage.seal, tokenizing(recorder), read
    train, heldout = (Tokens(path, *given) for path in paths)
    if context is None:
        return train, heldout
    dropped = [tokens.keep(tokens.longest() <= context, TOO_LONG) for tokens in (train, heldout)]
    if sum(dropped):
        recorder.metrics({"lengths/too_long": float(sum(dropped)), "lengths/max_tokens": float(context)}, step=0)
    for tokens, count, side in zip((train, heldout), dropped, ("training", "held-out"), strict=True):
        if count and not len(tokens):
            raise ValueError(f"{stage.name}: no {side} pair fits the model's context of {context} tokens")
    list_dropped(out, train, heldout)
    return train, heldout


def fitting_prompts(dataset: Path, train: Tokens) -> Iterator[str]:
    """The prompt of each training pair that `preference_tokens` kept."""
    kept = np.zeros(int(train.rows.max(initial=-1)) + 1, bool)
    kept[train.rows] = True
    return compress(Pairs(dataset / TRAIN, PreferenceExample).prompt_texts(), kept.tolist())


def tokenizing(recorder: Recorder) -> Report:
    """Progress callback for `Tokens`."""
    return lambda done, total: recorder.progress(done, total, "pairs", "tokenizing")
