"""Rows as micro-batches of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.data.batching import micro_batches, packed_micro_batches
from xray_runtime.data.rows import Ragged, Rows, alike_prompts, num_rows

if TYPE_CHECKING:
    import torch


def row_groups(rows: Rows, max_tokens: int, *, packed: bool) -> list[list[int]]:
    """Rows of each micro-batch: it computes no more than `max_tokens` tokens unless it is a single row.

    Args:
        packed: nothing is padded, and a shared prompt is computed once.
    """
    tokens, count = rows["input_ids"].lengths, num_rows(rows)
    rejected = rows["rejected_ids"].lengths if "rejected_ids" in rows else None
    if not packed:
        tokens = tokens if rejected is None else 2 * np.maximum(tokens, rejected)
        return micro_batches(tokens.tolist(), max_tokens)
    tokens = tokens if rejected is None else tokens + rejected
    shared, alike = np.zeros(count, np.int64), np.arange(count)
    if "prompt_lengths" in rows:
        shared, sides = rows["prompt_lengths"], alike_prompts(rows)
        alike = sides[:count]
        if rejected is not None:
            tokens = tokens - np.where(sides[count:] == alike, shared, 0)
    return packed_micro_batches(tokens.tolist(), shared.tolist(), alike.tolist(), max_tokens)


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
