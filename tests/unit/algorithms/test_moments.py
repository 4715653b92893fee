"""Running moments equal those of everything seen, however it came in."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict

import pytest
from hypothesis import given, strategies as st

from xray_runtime.algorithms.rewards import RunningMoments

finite = st.floats(-1e6, 1e6)


def test_by_hand() -> None:
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, deviation sqrt(14 / 4) = 1.8708287.
    moments = RunningMoments()
    moments.update([1.0, 2.0])
    assert moments == RunningMoments(2, 1.5, 0.5)
    moments.update([3.0, 6.0])
    assert (moments.count, moments.mean, moments.sum_squares) == (4, 3.0, 14.0)
    assert moments.std == pytest.approx(1.8708287, abs=1e-7)


@given(st.lists(st.lists(finite, max_size=6), max_size=8))
def test_batches_equal_the_whole(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    seen = [x for batch in batches for x in batch]
    assert moments.count == len(seen)
    if seen:
        assert moments.mean == pytest.approx(statistics.fmean(seen), rel=1e-9, abs=1e-6)
        variance = statistics.pvariance(seen)
        assert moments.sum_squares / len(seen) == pytest.approx(variance, rel=1e-6, abs=1e-4)


def test_a_large_offset_does_not_swallow_the_deviation() -> None:
    moments = RunningMoments()
    for x in (1e9 + 1, 1e9 + 2, 1e9 + 3):
        moments.update([x])
    assert moments.std == pytest.approx(0.8164966, rel=1e-6)  # sqrt(2 / 3); E[x^2] - E[x]^2 would give noise


@pytest.mark.parametrize("batches", [[], [[]], [[3.0]], [[3.0, 3.0], [3.0]]])
def test_dividing_by_the_deviation_is_always_safe(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    assert moments.std == 1.0


def test_the_fields_are_the_whole_state() -> None:
    moments = RunningMoments()
    moments.update([1.0, 5.0])
    resumed = RunningMoments(**json.loads(json.dumps(asdict(moments))))
    moments.update([2.0])
    resumed.update([2.0])
    assert resumed == moments
