"""Runs of one model under several layouts, compared and split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.layouts import (
    Run,
    differences,
    updates,
)
from xray_runtime.cluster.learner import Learner
from xray_runtime.data.batch import TextBatch


def same(run: Run, alone: Run) -> None:
    """Float32 sums in another order, and Adam's divisions: 20 times what `docs/layouts.md` measured."""
    losses, norms, weights = differences(run, alone)
    assert losses < 1e-5
    assert norms < 5e-5
    assert weights < 5e-5


def part(
    learner: Learner,
    deal: Callable[[TextBatch], TextBatch],
    batches: list[TextBatch],
    span: range,
    came: Path | None,
    goes: Path | None,
) -> dict[str, Any]:
    """Some of the updates: from a snapshot, to a snapshot."""
    if came is not None:
        learner.load_state(came)
    done = updates(learner, deal, batches, span.start, span.stop)
    if goes is not None:
        learner.save_state(goes)
    return done


def short_of(names: Iterable[str], *short: str) -> list[Any]:
    """Cases of a parametrized test: all but the `short` ones are long."""
    return [pytest.param(name, marks=[] if name in short else pytest.mark.long) for name in names]


def last_line(failure: BaseException) -> str:
    """The message of the error that ended a rank, whose whole traceback `failure` has."""
    return str(failure).strip().splitlines()[-1]
