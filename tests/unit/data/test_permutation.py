"""The computed order: each row once, every order as likely as any other, the same from wherever one asks."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import chi2, chisquare

from xray_runtime.data.batching import permuted

POWERS = [2**k + d for k in range(1, 13) for d in (-1, 0, 1)]


@pytest.mark.parametrize("num_rows", [*POWERS, 100_003])
def test_every_row_stands_once(num_rows: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(num_rows), num_rows, 7)), np.arange(num_rows))


@given(num_rows=st.integers(1, 2**31 - 1), seed=st.integers(0, 2**31 - 1), place=st.integers(0, 2**31 - 1))
def test_a_place_leads_to_the_same_row_whatever_else_is_asked(num_rows: int, seed: int, place: int) -> None:
    places = (place + np.arange(9)) % num_rows
    rows = permuted(places, num_rows, seed)
    assert ((rows >= 0) & (rows < num_rows)).all()
    assert [int(permuted(places[i : i + 1], num_rows, seed)[0]) for i in (0, 8)] == [rows[0], rows[8]]


@pytest.mark.parametrize("num_rows", [2, 3, 4])
def test_every_order_is_as_likely(num_rows: int) -> None:
    orders = list(permutations(range(num_rows)))
    found = Counter(tuple(permuted(np.arange(num_rows), num_rows, seed).tolist()) for seed in range(50 * len(orders)))
    assert chisquare([found[order] for order in orders]).pvalue > 1e-3


@pytest.mark.parametrize("num_rows", [7, 16, 17])
def test_every_row_is_as_likely_at_every_place_and_after_every_other(num_rows: int) -> None:
    num_seeds = 1000
    orders = np.array([permuted(np.arange(num_rows), num_rows, seed) for seed in range(num_seeds)])
    at_place = np.stack([np.bincount(orders[:, place], minlength=num_rows) for place in range(num_rows)])
    expected = num_seeds / num_rows
    # Each row and each place has num_seeds in all: (n − 1)² counts are free.
    assert chi2.sf(((at_place - expected) ** 2 / expected).sum(), (num_rows - 1) ** 2) > 1e-3
    steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % num_rows).ravel(), minlength=num_rows)[1:]
    assert chisquare(steps).pvalue > 1e-3
