"""Intervals that may be read at every observation: against the paper's formula, and by simulation."""

from __future__ import annotations

import math
import random

import pytest

from xray_runtime.algorithms.confidence_sequence import ConfidenceSequence


def test_the_first_interval_is_the_formula() -> None:
    found = ConfidenceSequence(0.05)
    assert (found.mean, found.low, found.high) == (None, 0.0, 1.0)
    found.add(1.0)
    # λ = min(√(2 log 40 / (1/4 · log 2)), 1/2) = 1/2, v = (1 − 1/2)², ψ = −log(1/2) − 1/2: 1 − (log 40 + vψ) / λ < 0.
    assert (found.mean, found.low, found.high) == (1.0, 0.0, 1.0)
    for _ in range(99):
        found.add(1.0)
    # By the definition, each λ and v from the observations before it.
    weights, slack, squares, total = 0.0, 0.0, 0.25, 0.0
    for t in range(1, 101):
        variance, mean = squares / t, (0.5 + total) / t
        weight = min(math.sqrt(2 * math.log(40) / (variance * t * math.log(1 + t))), 0.5)
        weights, slack, total = weights + weight, slack + (1 - mean) ** 2 * (-math.log(1 - weight) - weight), total + 1
        squares += (1 - (0.5 + total) / (t + 1)) ** 2
    assert found.low == pytest.approx(1 - (math.log(40) + slack) / weights, abs=1e-9)
    assert 0.9 < found.low < 1.0
    for x in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="must be from 0 to 1"):
            found.add(x)


def test_weights_shrink_as_the_observations_vary() -> None:
    """By theorem 2 over whole lists, where λ is below its bound."""
    draw = random.Random(3)
    x = [round(draw.random(), 3) for _ in range(120)]
    found, alpha, low, high, weights = ConfidenceSequence(0.5), 0.5, 0.0, 1.0, []
    for value in x:
        found.add(value)
    means = [(0.5 + math.fsum(x[:t])) / (t + 1) for t in range(121)]
    for t in range(1, 121):
        variance = (0.25 + math.fsum((x[i] - means[i + 1]) ** 2 for i in range(t - 1))) / t
        weights.append(min(math.sqrt(2 * math.log(2 / alpha) / (variance * t * math.log(1 + t))), 0.5))
        slack = math.fsum((x[i] - means[i]) ** 2 * (-math.log(1 - w) - w) for i, w in enumerate(weights))
        centre = math.fsum(w * x[i] for i, w in enumerate(weights)) / math.fsum(weights)
        half = (math.log(2 / alpha) + slack) / math.fsum(weights)
        low, high = max(low, centre - half), min(high, centre + half)
    assert weights[0] == 0.5
    assert weights[-1] < 0.3
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-12), pytest.approx(high, abs=1e-12))
    assert found.mean == pytest.approx(math.fsum(x) / 120)
    assert 0.0 < low < math.fsum(x) / 120 < high < 1.0


def test_the_mean_is_inside_at_every_look() -> None:
    draw, outside = random.Random(1), 0
    for _ in range(200):
        found = ConfidenceSequence(0.2)
        for _ in range(400):
            found.add(float(draw.random() < 0.3))
            if not found.low <= 0.3 <= found.high:
                outside += 1
                break
    # At most α = 0.2 of 200, and 3 standard deviations (5.7 each). A fixed 80% interval is left by most.
    assert outside <= 40 + 17
