"""Rows as micro-batches of tensors, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from xray_runtime.data.batch import PairBatch, Scores, TextBatch
from xray_runtime.data.batching import micro_batches, packed_micro_batches

if TYPE_CHECKING:
    import torch

    from xray_runtime.engines.engine import MicroBatch


def row_groups(rows: TextBatch, max_tokens: int, *, packed: bool, at_once: int = 1) -> list[list[int]]:
    """Rows of each micro-batch: it computes no more than `max_tokens` tokens unless it is a single row.

    Args:
        packed: nothing is padded, and a shared prompt is computed once.
        at_once: micro-batches that are computed at the same time. If more than 1, a multiple of it of about equal size
            where the rows allow.
    """
    tokens, count = rows.input_ids.lengths, len(rows)
    rejected = rows.rejected_ids.lengths if isinstance(rows, PairBatch) else None
    if not packed:
        tokens = tokens if rejected is None else 2 * np.maximum(tokens, rejected)
        return _even(partial(micro_batches, tokens.tolist()), int(tokens.sum()), max_tokens, at_once)
    tokens = tokens if rejected is None else tokens + rejected
    shared, alike = np.zeros(count, np.int64), np.arange(count)
    if "prompt_lengths" in rows:
        shared, sides = rows.prompt_lengths, rows.alike_prompts()
        alike = sides[:count]
        if rejected is not None:
            tokens = tokens - np.where(sides[count:] == alike, shared, 0)
    again = int(shared[alike != np.arange(count)].sum())
    split = partial(packed_micro_batches, tokens.tolist(), shared.tolist(), alike.tolist())
    return _even(split, int(tokens.sum()) - again, max_tokens, at_once)


def _even(split: Callable[[int], list[list[int]]], num_tokens: int, max_tokens: int, at_once: int) -> list[list[int]]:
    """Micro-batches of `split(most tokens)`; see `row_groups`."""
    fewest = split(max_tokens)
    count = math.ceil(len(fewest) / at_once) * at_once
    for eighths in range(8, 13) if at_once > 1 else ():
        even = split(min(math.ceil(num_tokens / count * eighths / 8), max_tokens))
        if len(even) <= count:
            return even
    return fewest


def as_tensors(rows: TextBatch, device: torch.device | str = "cpu") -> TextBatch[torch.Tensor]:
    """Rows as objectives read them."""
    import torch

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    batch = rows.with_columns(alike=rows.alike_prompts()) if "prompt_lengths" in rows else rows
    return cast("TextBatch[torch.Tensor]", batch.map(tensor))


def as_arrays(scores: Scores[torch.Tensor]) -> Scores:
    """Scores as they are sent: float32."""
    import torch

    def array(tensor: torch.Tensor) -> np.ndarray:
        # Offsets are whole numbers.
        detached = tensor.detach() if tensor.dtype == torch.int64 else tensor.detach().float()
        numbers: np.ndarray = detached.cpu().numpy()
        return numbers

    return cast("Scores", scores.map(array))


def joined(parts: Iterable[tuple[MicroBatch, Scores]]) -> Scores:
    """The scores of all micro-batches, in the order of the rows."""
    given = [(batch.rows, scores) for batch, scores in parts if batch.rows]
    return Scores.join([scores for _, scores in given], [rows for rows, _ in given])
