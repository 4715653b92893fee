"""Shards of the rollout ledger: equal rollouts are equal bytes, rows are found, and a change is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from xray_runtime.data.ledger import (
    LedgerShard,
    Query,
    first_difference,
    iterations,
    lists,
    read_shard,
    readable,
    shard_path,
    table_of,
)
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import train_tokenizer


def shard(iteration: int = 3, policy: str | None = "ab", **changes: Any) -> LedgerShard:
    """Four replies: one good, one bad, one whose judge failed, and one that others took the place of."""
    columns: dict[str, Any] = {
        "iteration": np.full(4, iteration, np.int32),
        "row": np.array([0, 1, 2, 3], np.int32),
        "round": np.zeros(4, np.int32),
        "prompt": np.array([7, 7, 9, 9]),
        "version": np.full(4, iteration, np.int32),
        "seed": np.array([11, 12, 13, 14]),
        "ended": np.array([True, False, True, True]),
        "prompt_ids": lists(Ragged.of([[5, 6], [5, 6], [8], [8]]), pa.int32()),
        "reply_ids": lists(Ragged.of([[20, 21], [22], [23], []]), pa.int32()),
        "logprobs": lists(Ragged.of([[-1.0, -2.0], [-3.0], [-0.5], []], np.float32), pa.float32()),
        "score/judge": pa.array([0.75, -1.0, math.nan, 0.5], pa.float32()),
        "score/length": pa.array([2.0, None, 1.0, 1.0], pa.float32()),
        "reward": pa.array([0.75, -1.0, None, 0.5], pa.float32()),
        "scaled_reward": pa.array([0.75, -1.0, None, None], pa.float32()),
        "advantages": lists(Ragged.of([[1.0, 2.0], [-1.0], [], []], np.float32), pa.float32()),
        "times_trained": np.array([2, 2, 0, 0], np.int32),
    }
    return LedgerShard(iteration, policy, table_of(columns | changes))


def found(**query: Any) -> list[int]:
    return Query(**query).select(shard().table)["row"].to_pylist()


def test_a_shard_comes_back_and_the_same_rows_are_the_same_bytes(tmp_path: Path) -> None:
    shard().write(tmp_path / "ledger")
    path = shard_path(tmp_path / "ledger", 3)
    assert [path.name for path in (tmp_path / "ledger").iterdir()] == ["000003.parquet"]
    back = read_shard(path)
    assert (back.iteration, back.policy) == (3, "ab")
    assert first_difference(back, shard()) is None
    assert path.read_bytes() == shard().to_bytes()
    assert shard().to_bytes() != shard(policy=None).to_bytes()


def test_any_reader_of_parquet_reads_it(tmp_path: Path) -> None:
    import datasets

    shard().write(tmp_path)
    rows = datasets.load_dataset("parquet", data_files=str(tmp_path / "*.parquet"), cache_dir=str(tmp_path / "cache"))
    assert rows["train"]["reply_ids"][:] == [[20, 21], [22], [23], []]


def test_iterations_are_those_of_whole_shards(tmp_path: Path) -> None:
    for number in (0, 12, 1_000_000):
        shard(number).write(tmp_path)
    (tmp_path / "000004.parquet.writing-1").touch()
    assert iterations(tmp_path) == [0, 12, 1_000_000]
    assert iterations(tmp_path / "nowhere") == []


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 200])
def test_invalid_shards_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "000000.parquet").write_bytes(content)
    with pytest.raises(ValueError, match="damaged, or not a shard"):
        read_shard(tmp_path / "000000.parquet")


def test_a_bit_that_is_turned_anywhere_gives_a_shard_or_one_kind_of_error(tmp_path: Path) -> None:
    """Whoever reads a ledger may meet anything; that it is not what was published, its digest says."""
    content, path = shard().to_bytes(), tmp_path / "000003.parquet"
    refused = 0
    for place in range(0, len(content), 31):
        changed = bytearray(content)
        changed[place] ^= 4
        path.write_bytes(bytes(changed))
        try:
            read_shard(path)
        except ValueError:
            refused += 1
    assert refused > 5


def test_rows_are_found_by_reward_source_and_use() -> None:
    assert found() == [0, 1, 2, 3]
    assert found(min_reward=0.5) == [0, 3]
    # A row without a reward is neither above nor below anything.
    assert found(max_reward=100.0) == [0, 1, 3]
    assert found(min_reward=-1.0, max_reward=0.5) == [1, 3]
    assert found(unused=True) == [2, 3]
    assert found(failed=True) == [2]
    assert found(source="length") == [0, 2, 3]
    assert found(source="length", min_reward=1.5) == [0]
    assert found(source="length", failed=True) == []
    assert found(source="judge", failed=True, unused=True) == [2]
    with pytest.raises(ValueError, match=r"'taste' is not allowed: must be one of 'judge', 'length'"):
        found(source="taste")


def test_rows_are_readable() -> None:
    tokenizer = train_tokenizer(["hello there"] * 5, 300)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in ("hello", "there", "hello", "there")]
    rows = list(readable(shard(reply_ids=lists(Ragged.of(ids), pa.int32())).table, tokenizer))
    assert [row["reply"] for row in rows] == ["hello", "there", "hello", "there"]
    assert [row["scores"] for row in rows[:3]] == [
        {"judge": 0.75, "length": 2.0},
        {"judge": -1.0, "length": None},
        {"judge": "failed", "length": 1.0},
    ]
    assert [row["advantage"] for row in rows] == [1.5, -1.0, None, None]
    assert [row["used"] for row in rows] == ["yes", "yes", "no: no reward", "no: it was replaced"]


def different(**changes: Any) -> str:
    return str(first_difference(shard(), shard(**changes)))


def test_the_first_difference_is_named() -> None:
    other = lists(Ragged.of([[20, 21], [22], [24], []]), pa.int32())
    assert different(reply_ids=other) == (
        "iteration 3, row 2, reply_ids of token 0: 23 in the ledger, 24 computed again"
    )
    longer = lists(Ragged.of([[20, 21], [22, 0], [23], []]), pa.int32())
    assert different(reply_ids=longer) == (
        "iteration 3, row 1, reply_ids: 1 tokens in the ledger, 2 tokens computed again"
    )
    # The first row counts, whatever the order of columns.
    late = lists(Ragged.of([[-1.0, -2.5], [-3.0], [-0.5], []], np.float32), pa.float32())
    assert "row 0, logprobs of token 1: -2.0 in" in different(reply_ids=other, logprobs=late)
    assert "row 2, score/judge: nan in the ledger, None" in different(
        **{"score/judge": pa.array([0.75, -1.0, None, 0.5], pa.float32())}
    )
    assert different(policy="cd") == "iteration 3, policy: ab in the ledger, cd computed again"
    fewer = LedgerShard(3, "ab", shard().table.slice(0, 3))
    assert str(first_difference(shard(), fewer)) == "iteration 3, rows: 4 in the ledger, 3 computed again"
    assert "columns" in str(first_difference(shard(), LedgerShard(3, "ab", shard().table.drop(["seed"]))))
    zero = shard(**{"score/length": pa.array([0.0, None, 1.0, 1.0], pa.float32())})
    minus = shard(**{"score/length": pa.array([-0.0, None, 1.0, 1.0], pa.float32())})
    assert "0.0 in the ledger, -0.0 computed" in str(first_difference(zero, minus))
