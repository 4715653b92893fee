"""Mixtures: shares that hold at every length, limits, ends, and the same order every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count, islice

import pytest

from xray_runtime.methods.prepare.body import mixed
from xray_runtime.methods.prepare.config import MixedSource

Part = tuple[float, Iterator[int], int | None]


def drawn_from(*parts: Part) -> Iterator[tuple[int, int]]:
    """The mixture of (weight, rows, limit)."""
    sources = [MixedSource(source="x", weight=weight, limit=limit) for weight, _, limit in parts]
    return mixed(sources, [rows for _, rows, _ in parts])


def test_shares_hold_at_every_length() -> None:
    weights = (0.7, 0.2, 0.1)
    drawn = list(islice(drawn_from(*((w, count(), None) for w in weights)), 1000))
    assert Counter(part for part, _ in drawn) == {0: 700, 1: 200, 2: 100}
    counts = [0, 0, 0]
    for number, (part, row) in enumerate(drawn, start=1):
        # Each source's rows come in their own order.
        assert row == counts[part]
        counts[part] += 1
        assert all(abs(counts[i] - number * w) <= 1 + 1e-9 for i, w in enumerate(weights))
    # Walked again, or by ten times the weights: the same.
    assert list(islice(drawn_from(*((10 * w, count(), None) for w in (0.7, 0.2, 0.1))), 1000)) == drawn
    assert drawn[337:] == list(islice(drawn_from(*((w, count(), None) for w in weights)), 337, 1000))


def test_a_limit_leaves_the_rest_to_the_others() -> None:
    drawn = list(islice(drawn_from((1, count(), 5), (2, count(), None), (1, count(), None)), 620))
    assert Counter(part for part, _ in drawn) == {0: 5, 1: 410, 2: 205}
    assert {part for part, _ in drawn[20:]} == {1, 2}
    assert list(drawn_from((1, count(), 2), (1, count(), 1))) == [(0, 0), (1, 0), (0, 1)]


def test_a_source_that_is_read_to_its_end_ends_the_mixture() -> None:
    drawn = [part for part, _ in drawn_from((3, iter(range(100)), None), (1, iter(range(10)), None))]
    assert Counter(drawn)[1] == 10
    assert Counter(drawn)[0] == pytest.approx(30, abs=3)
