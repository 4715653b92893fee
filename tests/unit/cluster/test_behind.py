"""The rank that lets others wait, by what each rank has done; NCCL's frames say nothing about that."""

from __future__ import annotations

import pytest

from xray_runtime.cluster.health import ranks_behind
from xray_runtime.cluster.types import Heartbeat

LIMIT_S = 600.0


def at(common_parts: int, stands_s: float) -> Heartbeat:
    """A heartbeat of a rank on a GPU: no frame of it is in a collective."""
    return Heartbeat(
        host="node",
        pid=1,
        waits_s=0.0,
        doing="step in engine.py:1",
        parts=common_parts,
        common_parts=common_parts,
        stands_s=stands_s,
        load=1.0,
    )


@pytest.mark.parametrize(
    ("ranks", "behind"),
    [
        # Rank 1 stands in micro-batch 7; the others have queued theirs and wait for its part of the sum.
        ([at(8, 700.0), at(7, 701.0), at(8, 699.0)], {1}),
        # It is slow, but moves.
        ([at(8, 700.0), at(7, 3.0)], set()),
        # All stand at the same place: none is to blame.
        ([at(8, 700.0), at(8, 700.0)], set()),
        ([at(0, 9000.0)], set()),
        ([at(9, 10.0), at(7, 650.0), at(6, 800.0)], {1, 2}),
    ],
)
def test_the_rank_that_stands_behind_the_others_is_named(ranks: list[Heartbeat], behind: set[int]) -> None:
    assert ranks_behind(dict(enumerate(ranks)), LIMIT_S) == behind
