"""Learning rates at hand-computed steps and over whole runs."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from xray_runtime.algorithms.schedules import learning_rate
from xray_runtime.engines.training_config import TrainingConfig


def config(peak: float = 1.0, **changes: Any) -> TrainingConfig:
    return TrainingConfig(lr=peak, **{"schedule": "linear", "warmup_fraction": 0.0, "final_lr_ratio": 0.0} | changes)


def rates(total: int, **changes: Any) -> list[float]:
    return [learning_rate(config(**changes), step, total) for step in range(total)]


def test_linear_by_hand() -> None:
    assert rates(5, peak=8.0) == pytest.approx([8.0, 6.0, 4.0, 2.0, 0.0])
    # Down to a quarter: 8 * (0.25 + 0.75 * (1, 3/4, 1/2, 1/4, 0)).
    assert rates(5, peak=8.0, final_lr_ratio=0.25) == pytest.approx([8.0, 6.5, 5.0, 3.5, 2.0])


def test_cosine_by_hand() -> None:
    # (1 + cos(pi x)) / 2 at 0, 1/4, 1/2, 3/4, 1; cos(pi / 4) = 0.7071068.
    assert rates(5, schedule="cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466, 0.0], abs=1e-7)
    assert rates(5, schedule="cosine", final_lr_ratio=0.1)[2] == pytest.approx(0.55)


def test_constant() -> None:
    assert rates(4, schedule="constant", final_lr_ratio=0.1) == [1.0] * 4


def test_warm_up_by_hand() -> None:
    # 3 of 6 steps warm up: 1/4, 2/4, 3/4, then the peak at step 3 and down to the end at step 5.
    assert rates(6, warmup_fraction=0.5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.5, 0.0])
    assert rates(6, warmup_fraction=0.5, schedule="constant") == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@given(
    total=st.integers(1, 300),
    peak=st.floats(1e-6, 1.0),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.floats(0.0, 0.99),
    final=st.floats(0.0, 1.0),
)
def test_a_run_rises_then_never_rises_again(
    total: int, peak: float, schedule: str, warmup: float, final: float
) -> None:
    run = rates(total, peak=peak, schedule=schedule, warmup_fraction=warmup, final_lr_ratio=final)
    start = round(total * warmup)
    assert all(0.0 <= lr <= peak * (1 + 1e-12) for lr in run)
    assert run[0] > 0
    assert all(a < b for a, b in pairwise(run[: start + 1]))
    assert all(a >= b - 1e-15 for a, b in pairwise(run[start:]))
    if schedule != "constant" and total - start >= 2:
        assert run[-1] == pytest.approx(peak * final, abs=1e-15)


def test_beyond_the_end_stays_at_the_end() -> None:
    for schedule in ("linear", "cosine"):
        given = config(peak=2.0, schedule=schedule, final_lr_ratio=0.1)
        assert learning_rate(given, 99, 10) == pytest.approx(0.2)


def test_another_peak_replaces_the_configs() -> None:
    assert learning_rate(config(schedule="constant"), 0, 2, peak=3.0) == 3.0


def test_one_step_is_taken_at_the_peak() -> None:
    for schedule in ("constant", "linear", "cosine"):
        assert rates(1, schedule=schedule, warmup_fraction=0.05) == [1.0]


def test_the_second_of_two_steps_is_at_the_end() -> None:
    assert rates(2, schedule="linear") == [1.0, 0.0]
    assert rates(3, schedule="linear", warmup_fraction=0.33) == [0.5, 1.0, 0.0]
    assert math.isclose(rates(1, warmup_fraction=0.9)[0], 0.5)  # round(0.9) = 1 step of warm-up
