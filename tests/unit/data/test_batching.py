"""Batching: every row exactly once, little padding, and an order that an interruption cannot change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from xray_runtime.data.batching import Cursor, micro_batches


@given(lengths=st.lists(st.integers(1, 200), max_size=80), max_tokens=st.integers(1, 600))
def test_micro_batches_hold_every_row_once_within_the_limit(lengths: list[int], max_tokens: int) -> None:
    batches = micro_batches(lengths, max_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens
    # Sorted by length: no row of a batch is shorter than any row of a later one.
    for before, after in pairwise(batches):
        assert min(lengths[i] for i in before) >= max(lengths[i] for i in after)


def test_micro_batches_by_hand() -> None:
    # Longest first: 9 alone (2 x 9 > 16), 8 and 7 pad to 2 x 8 = 16, the rest pads to 3 x 2 = 6.
    assert micro_batches([2, 9, 8, 2, 7, 1], 16) == [[1], [2, 4], [0, 3, 5]]
    assert micro_batches([5, 40], 16) == [[1], [0]]
    assert micro_batches([], 16) == []


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**31 - 1), epochs=st.integers(1, 3), step=st.integers(1, 50))
def test_every_row_once_an_epoch(num_rows: int, seed: int, epochs: int, step: int) -> None:
    cursor = Cursor(num_rows, seed)
    rows: list[int] = []
    while len(rows) < epochs * num_rows:
        rows += cursor.take(step)
    for epoch in range(epochs):
        assert sorted(rows[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@given(
    num_rows=st.integers(1, 30),
    seed=st.integers(0, 2**31 - 1),
    takes=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    stop=st.integers(0, 7),
)
def test_a_resumed_cursor_continues_exactly(num_rows: int, seed: int, takes: list[int], stop: int) -> None:
    whole = Cursor(num_rows, seed)
    expected = [whole.take(n) for n in takes]
    cursor = Cursor(num_rows, seed)
    rows = []
    for number, n in enumerate(takes):
        if number == stop:
            cursor = Cursor(num_rows, seed, cursor.epoch, cursor.position)
        rows.append(cursor.take(n))
    assert rows == expected
    assert cursor == whole


def test_epochs_and_seeds_differ_in_order() -> None:
    cursor = Cursor(50, seed=1)
    first, second = cursor.take(50), cursor.take(50)
    assert first != second
    assert Cursor(50, seed=2).take(50) != first
    assert Cursor(50, seed=1).take(50) == first


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no rows"):
        Cursor(0, seed=0)
    with pytest.raises(ValueError, match="no position 5 of epoch 0 in 5 rows"):
        Cursor(5, seed=0, position=5)
