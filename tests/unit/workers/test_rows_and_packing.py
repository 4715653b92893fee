"""Rows between actors: dealt, packed and put together again without losing, doubling or swapping one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from xray_runtime.data.batching import micro_batches
from xray_runtime.data.rows import (
    Ragged,
    Rows,
    balance,
    load_rows,
    merge,
    num_response_tokens,
    num_rows,
    save_rows,
    shard,
    take,
    text_rows,
    with_end_of_turn,
)

SEQUENCES = st.lists(st.lists(st.integers(0, 50_000), max_size=12), max_size=20)
NUM_ROWS = st.integers(1, 30)
PARTS = st.integers(1, 8)


def table(n: int) -> Rows:
    """Columns of each kind that travels, every row different."""
    ids = np.arange(n)
    return {
        "input_ids": Ragged.of(i * 100 + np.arange(i % 4) for i in range(n)),
        "prompt_lengths": ids + 1,
        "old_logprobs": Ragged.of((-i - np.linspace(0, 0.5, 3) for i in range(n)), np.float32),
        "ended": ids % 3 == 0,
    }


def assert_same(a: Rows, b: Rows) -> None:
    assert list(a) == list(b)
    for name in a:
        assert type(a[name]) is type(b[name])
        columns = [(a[name], b[name])]
        if isinstance(a[name], Ragged):
            columns = [(a[name].values, b[name].values), (a[name].offsets, b[name].offsets)]
        for found, expected in columns:
            np.testing.assert_array_equal(found, expected, strict=True)


def test_ragged_by_hand() -> None:
    rows = Ragged.of(row for row in ([7, 8, 9], [], [5]))
    assert (rows.values.tolist(), rows.offsets.tolist()) == ([7, 8, 9, 5], [0, 3, 3, 4])
    assert rows.lengths.tolist() == [3, 0, 1]
    assert rows[np.array([2, 0, 2])].values.tolist() == [5, 7, 8, 9, 5]
    assert rows[1:].offsets.tolist() == [0, 0, 1]
    assert rows.mask().tolist() == [[True, True, True], [False, False, False], [True, False, False]]
    assert rows.dense().tolist() == [[7, 8, 9], [0, 0, 0], [5, 0, 0]]
    none = Ragged.of([], np.float32)
    assert (len(none), list(none), none.dense().shape, none.values.dtype) == (0, [], (0, 0), np.float32)
    assert Ragged.of([[], []]).dense().shape == (2, 0)


@pytest.mark.parametrize("count", [0, 1, 9])
def test_rows_come_back_from_a_file_as_they_were(tmp_path: Path, count: int) -> None:
    rows = table(count) | {"part": np.arange(2 * count)[::2]}
    rows["said"] = np.array(["é" * row for row in range(count)], object)
    save_rows(tmp_path / "rows.safetensors", rows)
    found = load_rows(tmp_path / "rows.safetensors")
    assert found.keys() == rows.keys()
    assert_same({name: found[name] for name in rows}, rows)


@given(sequences=SEQUENCES, data=st.data())
def test_ragged_rows_are_lists(sequences: list[list[int]], data: st.DataObject) -> None:
    rows = Ragged.of(sequences)
    assert [row.tolist() for row in rows] == sequences
    assert [row[:n].tolist() for row, n in zip(rows.dense(), rows.lengths, strict=True)] == sequences
    first, step = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 4))
    assert [row.tolist() for row in rows[first::step]] == sequences[first::step]
    if sequences:
        index = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=30))
        assert [row.tolist() for row in rows[np.array(index, dtype=int)]] == [sequences[i] for i in index]


def test_rows_are_divided_in_turn() -> None:
    parts = shard({"id": np.arange(7)}, 3)
    assert [part["id"].tolist() for part in parts] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [part["id"].tolist() for part in shard({"id": np.arange(2)}, 3)] == [[0], [1], []]
    assert merge(parts, {"id": np.arange(7)})["id"].tolist() == list(range(7))


def test_rows_with_the_same_prompts_stay_together() -> None:
    prompts, replies = [[1], [1, 2], [1], [3], [1, 2], [1], [3]], [[n] for n in range(7)]
    rows = text_rows(prompts, replies) | {"id": np.arange(7)}
    parts = shard(rows, 3)
    # By prompt: 0 2 5, 1 4, 3 6.
    assert [part["id"].tolist() for part in parts] == [[0, 2, 5], [1, 4], [3, 6]]
    assert_same(merge(parts, rows), rows)
    assert [part["id"].tolist() for part in shard(rows, 2)] == [[0, 2, 5, 1], [4, 3, 6]]
    pairs = rows | {"rejected_ids": rows["input_ids"]}
    assert [part["id"].tolist() for part in shard(pairs, 3)] == [[0, 2, 5], [1, 4], [3, 6]]
    different = text_rows([[n] for n in range(5)], replies[:5]) | {"id": np.arange(5)}
    assert [part["id"].tolist() for part in shard(different, 2)] == [[0, 2, 4], [1, 3]]


@given(n=NUM_ROWS, parts=PARTS)
def test_shards_merge_to_the_same_rows(n: int, parts: int) -> None:
    rows = table(n)
    dealt = shard(rows, parts)
    assert sum(map(num_rows, dealt)) == n
    assert max(map(num_rows, dealt)) - min(map(num_rows, dealt)) <= 1
    assert_same(merge(dealt, rows), rows)


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40).map(sorted), parts=PARTS)
def test_sorted_rows_are_shared_out_fairly(lengths: list[int], parts: int) -> None:
    """No part has more work than another by more than one longest row, however uneven the rows are."""
    work = [int(part["lengths"].sum()) for part in shard({"lengths": np.array(lengths)}, parts)]
    assert max(work) - min(work) <= lengths[-1]


@given(n=NUM_ROWS, parts=PARTS, data=st.data())
def test_results_of_rows_keep_their_order(n: int, parts: int, data: st.DataObject) -> None:
    """As in a WholeModel: each Workhorse answers for its own rows, in micro-batches of like length, in any order."""
    lengths = np.array(data.draw(st.lists(st.integers(1, 20), min_size=n, max_size=n)))
    max_tokens = data.draw(st.integers(1, 60))

    def answer(rows: Rows) -> Rows:
        out = np.zeros(num_rows(rows), dtype=np.int64)
        for index in micro_batches(rows["lengths"].tolist(), max_tokens):
            batch = take(rows, index)
            out[index] += batch["id"] * 1000 + batch["lengths"]
        return {"score": out}

    rows = {"id": np.arange(n), "lengths": lengths}
    scores = merge([answer(part) for part in shard(rows, parts)], rows)["score"]
    assert scores.tolist() == [i * 1000 + length for i, length in enumerate(lengths.tolist())]


def test_take_by_hand() -> None:
    rows = {"id": np.arange(4), "pair": np.arange(8).reshape(4, 2)}
    assert_same(take(rows, [2, 0, 2]), {"id": np.array([2, 0, 2]), "pair": np.array([[4, 5], [0, 1], [4, 5]])})
    # An empty list has no type of its own: it must not turn into an index of floats.
    assert_same(take(rows, []), {"id": np.zeros(0, int), "pair": np.zeros((0, 2), int)})
    with pytest.raises(IndexError):
        take(rows, [4])


@given(n=NUM_ROWS, data=st.data())
def test_taking_twice_is_taking_once(n: int, data: st.DataObject) -> None:
    first = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    second = data.draw(st.lists(st.integers(0, len(first) - 1), max_size=20))
    assert_same(take(take(table(n), first), np.array(second)), take(table(n), [first[i] for i in second]))


def test_taking_copies() -> None:
    rows: Any = {"id": np.arange(3)}
    take(rows, [0, 1])["id"][0] = 99
    assert rows["id"].tolist() == [0, 1, 2]


def test_rows_of_prompt_and_reply() -> None:
    rows = text_rows([[5, 6], [8], [4]], [[7], np.array([9, 10, 1]), []])
    assert [ids.tolist() for ids in rows["input_ids"]] == [[5, 6, 7], [8, 9, 10, 1], [4]]
    assert rows["prompt_lengths"].tolist() == [2, 1, 1]
    assert num_response_tokens(rows) == 4


def test_a_reply_ends_with_one_end_of_turn() -> None:
    assert with_end_of_turn([5, 6], (1, 2)) == [5, 6, 1]
    assert with_end_of_turn([5, 1], (1, 2)) == [5, 1]
    assert with_end_of_turn([1, 5], (1, 2)) == [1, 5, 1]
    assert with_end_of_turn([], (1, 2)) == [1]
    assert with_end_of_turn([5, 2], (1, 2)) == [5, 2]


def test_loads_are_balanced_by_cost_and_the_same_each_time() -> None:
    costs = [9, 1, 1, 8, 2, 7]
    # 9 → 0; 8 → 1; 7 → 1 (15); 2 → 0 (11); 1 → 0 (12); 1 → 0 (13).
    assert balance(costs, 2) == [[0, 1, 2, 4], [3, 5]]
    assert balance([5, 5, 5], 3) == [[0], [1], [2]]
    assert balance([4], 3) == [[0], [], []]


def test_heads_are_the_first_values_of_each_row() -> None:
    rows = Ragged(np.arange(12).reshape(6, 2), np.array([0, 3, 4, 6]))
    heads = rows.heads(np.array([2, 0, 2]))
    assert heads.values.tolist() == [[0, 1], [2, 3], [8, 9], [10, 11]]
    assert heads.offsets.tolist() == [0, 2, 2, 4]
