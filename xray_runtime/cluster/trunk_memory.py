"""The outputs of a frozen trunk, computed once a rollout and remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from xray_runtime.data.batch import TextBatch

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.engines.engine import Scorer


class TrunkMemory:
    """The trunk's states of the rows that were scored last, by row id."""

    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {}
        self._digest = ""

    def forget(self) -> None:
        self._states, self._digest = {}, ""

    def identified(self, rows: TextBatch) -> TextBatch:
        """`rows` with an `id` each; drops the states of other rows.

        States are not remembered by row: batching may change the last bits of a row's states. Rows without an `id` get
        those of none that is trained on: a later update must not take their states for its own.
        """
        ids = rows.input_ids
        digest = xxhash.xxh3_128_hexdigest(ids.values.tobytes() + ids.offsets.tobytes())
        if digest != self._digest:
            self.forget()
        self._digest = digest
        return rows if "id" in rows else rows.with_columns(id=-1 - np.arange(len(ids)))

    def filled(self, rows: TextBatch, tensors: TextBatch[Tensor], scorer: Scorer, world_size: int) -> TextBatch[Tensor]:
        """A micro-batch with the trunk's states, remembered or computed now."""
        import torch

        from xray_runtime.models.objectives import prompts_of

        ids, texts = rows.id.tolist(), tensors.input_ids
        lengths = texts.lengths.tolist()
        missing = torch.tensor(int(any(i not in self._states for i in ids)), device=texts.values.device)
        if world_size > 1:
            # A sharded trunk's pass is a collective: either all ranks make it or none.
            torch.distributed.all_reduce(missing, torch.distributed.ReduceOp.MAX)
        if missing:
            entering = texts.values, texts.lengths, prompts_of(tensors)
            states = scorer.forward(type(scorer.module).trunk, *entering)
            self._states |= dict(zip(ids, states.split(lengths), strict=True))
        # Scored rows may be longer by an end token.
        own = torch.cat([self._states[i][:length] for i, length in zip(ids, lengths, strict=True)])
        return tensors.with_columns(trunk=texts.like(own))
