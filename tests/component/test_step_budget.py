"""The overhead of an optimizer step: how many operations it runs, and how often the host waits for a number. The
waits do not grow with the number of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.layouts import BASE, CONFIG, global_batches, make_model, spec_of
from benchmarks.ranks import run_ranks
from tests.unit.models.on_cuda import Operations, Waits
from xray_runtime.cluster.learner import Learner
from xray_runtime.data.batch import StepTotals, TextBatch


def counted(learner: Learner, deal: Callable[[TextBatch], TextBatch], rows: TextBatch) -> tuple[int, Counter[str]]:
    """(operations, waits) of the third step: the first ones make what later ones keep."""
    engine: Any = learner.engine
    step, operations, waits = engine.apply, Operations(), Waits()

    def apply(lr: float) -> float:
        with operations, waits:
            return float(step(lr))

    for number in range(3):
        engine.apply = apply if number == 2 else step
        learner.train(deal(rows), StepTotals(tokens=1.0), CONFIG.lr)
    return operations.count, waits.counts


@pytest.mark.parametrize(
    ("layout", "most", "most_a_layer", "waits"),
    [
        pytest.param({}, 22, 0, 2, id="1 process"),
        # DeepSpeed copies each gradient and weight.
        pytest.param({"zero_stage": 3, "num_workhorses": 2}, 220, 80, 2, id="ZeRO-3 × 2"),
        pytest.param({"zero_stage": 1, "num_workhorses": 2}, 370, 145, 4, id="ZeRO-1 × 2", marks=pytest.mark.long),
        pytest.param({"library": "fsdp2", "num_workhorses": 2}, 27, 0, 3, id="FSDP2 × 2", marks=pytest.mark.long),
    ],
)
def test_operations_and_waits(layout: dict[str, Any], most: int, most_a_layer: int, waits: int, tmp_path: Path) -> None:
    def ranks(layers: int) -> list[tuple[int, Counter[str]]]:
        model = make_model(tmp_path / str(layers), BASE.model_copy(update={"num_layers": layers}))
        return run_ranks(spec_of(model, layout), tmp_path, counted, global_batches(model, 1)[0])

    for (of_one, waits_of_one), (of_four, waits_of_four) in zip(ranks(1), ranks(4), strict=True):
        assert 0 < of_one <= most
        assert of_four - of_one <= 3 * most_a_layer
        assert waits_of_four == waits_of_one
        assert 0 < waits_of_one.total() <= waits
