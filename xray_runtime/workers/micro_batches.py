"""Rows as micro-batches of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.data.batching import micro_batches, packed_micro_batches
from xray_runtime.data.rows import Ragged, Rows, alike_prompts, num_rows

if TYPE_CHECKING:
    import torch


def row_groups(rows: Rows, max_tokens: int, *, packed: bool, at_once: int = 1) -> list[list[int]]:
    """Rows of each micro-batch: it computes no more than `max_tokens` tokens unless it is a single row.

    Args:
        packed: nothing is padded, and a shared prompt is computed once.
        at_once: micro-batches that are computed at the same time. If more than 1, a multiple of it of about equal size
            where the rows allow.
    """
    tokens, count = rows["input_ids"].lengths, num_rows(rows)
    rejected = rows["rejected_ids"].lengths if "rejected_ids" in rows else None
    if not packed:
        tokens = tokens if rejected is None else 2 * np.maximum(tokens, rejected)
        return _even(partial(micro_batches, tokens.tolist()), int(tokens.sum()), max_tokens, at_once)
    tokens = tokens if rejected is None else tokens + rejected
    shared, alike = np.zeros(count, np.int64), np.arange(count)
    if "prompt_lengths" in rows:
        shared, sides = rows["prompt_lengths"], alike_prompts(rows)
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


def as_tensors(rows: Rows, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Rows as objectives read them."""
    import torch

    columns = {name: column.values if isinstance(column, Ragged) else column for name, column in rows.items()}
    columns["lengths"] = rows["input_ids"].lengths
    if "rejected_ids" in rows:
        columns["rejected_lengths"] = rows["rejected_ids"].lengths
    if "prompt_lengths" in rows:
        columns["alike"] = alike_prompts(rows)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}
    # uint16 is bfloat16, see `Learner.trunk`.
    bits = {name: tensor.view(torch.bfloat16) for name, tensor in tensors.items() if tensor.dtype == torch.uint16}
    return {name: tensor.to(device) for name, tensor in (tensors | bits).items()}


class Columns:
    """Columns of `count` rows, filled micro-batch by micro-batch."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._columns: dict[str, list[np.ndarray]] = {}

    def add(self, name: str, places: Sequence[int], of_rows: Iterable[torch.Tensor]) -> None:
        """Put a number, or the numbers of its response tokens, in each row of `places`."""
        column = self._columns.setdefault(name, [np.zeros(0)] * self._count)
        for row, tensor in zip(places, of_rows, strict=False):
            column[row] = tensor.float().cpu().numpy()

    def rows(self) -> Rows:
        """The columns; those of response tokens are `Ragged`."""
        return {
            name: np.array(column) if column[0].ndim == 0 else Ragged.of(column, np.float32)
            for name, column in self._columns.items()
        }
