"""Remembered outputs of a frozen trunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from xray_runtime.data.batch import TextBatch

if TYPE_CHECKING:
    from torch import Tensor


class TrunkMemory:
    """The trunk's states of the rows that were scored last, by row id."""

    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {}
        self._digest = ""

    def forget(self) -> None:
        self._states, self._digest = {}, ""

    def identified(self, rows: TextBatch) -> TextBatch:
        """`rows` with an `id` each; drops the states of other rows.

        States are not remembered by row: batching may change the last bits of a row's states.
        """
        ids = rows.input_ids
        digest = xxhash.xxh3_128_hexdigest(ids.values.tobytes() + ids.offsets.tobytes())
        if digest != self._digest:
            self.forget()
        self._digest = digest
        return rows if "id" in rows else rows.with_columns(id=np.arange(len(ids)))

    def lacks(self, ids: Sequence[int]) -> bool:
        """Whether the states of any of the rows are missing."""
        return any(i not in self._states for i in ids)

    def add(self, ids: Sequence[int], states: Tensor, lengths: Sequence[int]) -> None:
        """Remember packed states [N, H] of rows with these lengths."""
        self._states |= dict(zip(ids, states.split(lengths), strict=True))

    def packed(self, ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The states [N, H] of rows, cut to these lengths: scored rows may be longer by an end token."""
        import torch

        return torch.cat([self._states[i][:length] for i, length in zip(ids, lengths, strict=True)])
