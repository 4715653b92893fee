"""Rows between actors: dealt, packed and put together again without losing, doubling or swapping one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from xray_runtime.data.batch import PairBatch, PolicyBatch, TextBatch, with_end_of_turn
from xray_runtime.data.batching import micro_batches
from xray_runtime.data.columnar import ColumnBatch
from xray_runtime.data.ragged import Ragged, balance

SEQUENCES = st.lists(st.lists(st.integers(0, 50_000), max_size=12), max_size=20)
NUM_ROWS = st.integers(1, 30)
PARTS = st.integers(1, 8)


def table(n: int) -> PolicyBatch:
    """Columns of each kind that travels, every row different."""
    ids = np.arange(n)
    return PolicyBatch(
        input_ids=Ragged.of(i * 100 + np.arange(i % 4) for i in range(n)),
        prompt_lengths=ids + 1,
        old_logprobs=Ragged.of((-i - np.linspace(0, 0.5, 3) for i in range(n)), np.float32),
        others={"ended": ids % 3 == 0},
    )


def numbered(n: int, **columns: Any) -> ColumnBatch:
    """Rows with a number each."""
    return ColumnBatch(others={"id": np.arange(n)} | columns)


def dealt(rows: ColumnBatch, count: int) -> list[ColumnBatch]:
    """The shards of a batch."""
    return [rows.take(places) for places in rows.shard_places(count)]


def together(parts: list[ColumnBatch], rows: ColumnBatch) -> ColumnBatch:
    """What was made of the shards of `rows`, in their order."""
    return type(parts[0]).join(parts, [places.tolist() for places in rows.shard_places(len(parts))])


def ids_of(parts: list[ColumnBatch]) -> list[list[int]]:
    return [part.others["id"].tolist() for part in parts]  # type: ignore[union-attr]


def assert_same(one: ColumnBatch, other: ColumnBatch) -> None:
    assert type(one) is type(other)
    a, b = one.columns(), other.columns()
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
    said = np.array(["é" * row for row in range(count)], object)
    rows = table(count).with_columns(part=np.arange(2 * count)[::2], said=said)
    rows.save(tmp_path / "rows.safetensors")
    found = PolicyBatch.load(tmp_path / "rows.safetensors")
    assert found.columns().keys() == rows.columns().keys()
    assert_same(PolicyBatch.of_columns({name: found.columns()[name] for name in rows.columns()}), rows)


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
    parts = dealt(numbered(7), 3)
    assert ids_of(parts) == [[0, 3, 6], [1, 4], [2, 5]]
    assert ids_of(dealt(numbered(2), 3)) == [[0], [1], []]
    assert ids_of([together(parts, numbered(7))]) == [list(range(7))]


def test_rows_with_the_same_prompts_stay_together() -> None:
    prompts, replies = [[1], [1, 2], [1], [3], [1, 2], [1], [3]], [[n] for n in range(7)]
    rows = TextBatch.of(prompts, replies).with_columns(id=np.arange(7))
    parts = dealt(rows, 3)
    # By prompt: 0 2 5, 1 4, 3 6.
    assert [part.id.tolist() for part in parts] == [[0, 2, 5], [1, 4], [3, 6]]
    assert_same(together(parts, rows), rows)
    assert [part.id.tolist() for part in dealt(rows, 2)] == [[0, 2, 5, 1], [4, 3, 6]]
    pairs = rows.as_kind(PairBatch, rejected_ids=rows.input_ids)
    assert [part.id.tolist() for part in dealt(pairs, 3)] == [[0, 2, 5], [1, 4], [3, 6]]
    different = TextBatch.of([[n] for n in range(5)], replies[:5]).with_columns(id=np.arange(5))
    assert [part.id.tolist() for part in dealt(different, 2)] == [[0, 2, 4], [1, 3]]


@given(n=NUM_ROWS, parts=PARTS)
def test_shards_merge_to_the_same_rows(n: int, parts: int) -> None:
    rows = table(n)
    shards = dealt(rows, parts)
    assert sum(map(len, shards)) == n
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert_same(together(shards, rows), rows)


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40).map(sorted), parts=PARTS)
def test_sorted_rows_are_shared_out_fairly(lengths: list[int], parts: int) -> None:
    """No part has more work than another by more than one longest row, however uneven the rows are."""
    work = [
        int(part.others["lengths"].sum()) for part in dealt(ColumnBatch(others={"lengths": np.array(lengths)}), parts)
    ]
    assert max(work) - min(work) <= lengths[-1]


@given(n=NUM_ROWS, parts=PARTS, data=st.data())
def test_results_of_rows_keep_their_order(n: int, parts: int, data: st.DataObject) -> None:
    """As in a WholeModel: each Workhorse answers for its own rows, in micro-batches of like length, in any order."""
    lengths = np.array(data.draw(st.lists(st.integers(1, 20), min_size=n, max_size=n)))
    max_tokens = data.draw(st.integers(1, 60))

    def answer(rows: ColumnBatch) -> ColumnBatch:
        out = np.zeros(len(rows), dtype=np.int64)
        for index in micro_batches(rows.others["lengths"].tolist(), max_tokens):
            batch = rows.take(index)
            out[index] += batch.others["id"] * 1000 + batch.others["lengths"]
        return ColumnBatch(others={"score": out})

    rows = numbered(n, lengths=lengths)
    scores = together([answer(part) for part in dealt(rows, parts)], rows).others["score"]
    assert scores.tolist() == [i * 1000 + length for i, length in enumerate(lengths.tolist())]


def test_take_by_hand() -> None:
    rows = numbered(4, pair=np.arange(8).reshape(4, 2))
    again = {"id": np.array([2, 0, 2]), "pair": np.array([[4, 5], [0, 1], [4, 5]])}
    assert_same(rows.take([2, 0, 2]), ColumnBatch(others=again))
    # An empty list has no type of its own: it must not turn into an index of floats.
    assert_same(rows.take([]), ColumnBatch(others={"id": np.zeros(0, int), "pair": np.zeros((0, 2), int)}))
    with pytest.raises(IndexError):
        rows.take([4])


@given(n=NUM_ROWS, data=st.data())
def test_taking_twice_is_taking_once(n: int, data: st.DataObject) -> None:
    first = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    second = data.draw(st.lists(st.integers(0, len(first) - 1), max_size=20))
    assert_same(table(n).take(first).take(np.array(second)), table(n).take([first[i] for i in second]))


def test_taking_copies() -> None:
    rows = table(3)
    rows.take([0, 1]).prompt_lengths[0] = 99
    assert rows.prompt_lengths.tolist() == [1, 2, 3]


def test_rows_of_prompt_and_reply() -> None:
    rows = TextBatch.of([[5, 6], [8], [4]], [[7], np.array([9, 10, 1]), []])
    assert [ids.tolist() for ids in rows.input_ids] == [[5, 6, 7], [8, 9, 10, 1], [4]]
    assert rows.prompt_lengths.tolist() == [2, 1, 1]
    assert rows.num_response_tokens() == 4


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


def test_loads_are_those_of_a_search_for_the_least_each_time() -> None:
    rng = np.random.default_rng(0)
    for num_loads in (1, 3, 16):
        costs = rng.integers(0, 9, 200)
        loads: list[list[int]] = [[] for _ in range(num_loads)]
        for row in sorted(range(200), key=lambda row: -costs[row]):
            least = min(range(num_loads), key=lambda load: sum(costs[r] for r in loads[load]))
            loads[least].append(row)
        assert balance(costs, num_loads) == [sorted(load) for load in loads]
