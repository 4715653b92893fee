"""The remembered outputs of a frozen trunk."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from torch import Tensor

from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.cluster.trunk_memory import TrunkMemory
from xray_runtime.data.batch import TextBatch


class Scorer:
    """Of a model whose trunk's output is the token's number."""

    class Module:
        def trunk(self, values: Tensor) -> Tensor:
            return values.float()[:, None]

    module = Module()

    def forward(self, function: Any, values: Tensor, *_: Any) -> Tensor:
        found: Tensor = function(self.module, values)
        return found


def states(memory: TrunkMemory, rows: TextBatch) -> list[list[float]]:
    tensors, scorer = as_tensors(rows), cast("Any", Scorer())
    trunk: Tensor = memory.filled(rows, tensors, scorer, 1).trunk.values
    return trunk[:, 0].tolist()


@pytest.mark.parametrize("numbers", [(), (5, 6)])
def test_rows_that_are_scored_in_between_leave_no_states_to_those_of_the_update(numbers: tuple[int, ...]) -> None:
    """A policy that is its own teacher, or has branches for rewards, scores other texts before the update."""
    memory = TrunkMemory()
    rows = TextBatch.of([[1, 2], [3]], [[4], [5]]).with_columns(id=np.arange(2))
    others = TextBatch.of([[11, 12, 13], [14, 15]], [[4], [5]])
    others = others.with_columns(id=np.array(numbers)) if numbers else others
    for scored in (rows, others):
        identified = memory.identified(scored)
        assert states(memory, identified) == scored.input_ids.values.tolist()
    assert states(memory, rows.take(np.array([1, 0]))) == [3, 5, 1, 2, 4]
