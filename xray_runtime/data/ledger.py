"""The files of the rollout ledger: of every iteration one Parquet shard, in it one row a reply.

`data.columns` lists the columns. Rows that others took the place of come last. Where tokens are hashed, `answers` and
each column of lists are gone: of C there are `C_hash`, a salted digest of the row, and, where C holds numbers,
`C_mean`. Equal rollouts are equal bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from xray_runtime.data.rows import Ragged
from xray_runtime.data.tokenizing import decode_replies, own_text, transcript
from xray_runtime.files import write_atomic

LEDGER = "ledger"
"""Directory of a checkpoint that holds them."""
TOKENS = ("prompt_ids", "reply_ids")
NUMBERS = ("rollout_logprobs", "logprobs", "ref_logprobs", "advantages", "weights")
"""Columns of lists: of token ids, and of numbers of each token of the reply."""
ANSWERS = "answers"
OF_EPISODES = ("reply_ids", "response_mask")
GOLD = "gold"
SCORE, FAILURE = "score/", "failure/"
"""Before the name of a source of reward."""
DIGITS = 6
TYPES = {np.dtype("int64"): pa.int64(), np.dtype("int32"): pa.int32(), np.dtype("float32"): pa.float32()}


@dataclass(frozen=True)
class Shard:
    """The rollouts of one iteration."""

    iteration: int
    policy: str | None
    """Digest of the trained weights that the generator took over before it; None where none were sent (before the first
    update the policy is its parent) or they went from GPU to GPU, unread."""
    table: pa.Table

    def to_bytes(self) -> bytes:
        """The one file of this shard."""
        about = {"iteration": str(self.iteration)} | ({"policy": self.policy} if self.policy else {})
        out = pa.BufferOutputStream()
        # Hardly a number comes twice: a dictionary of them takes five times as long, and half as much space again.
        table = self.table.replace_schema_metadata(about)
        parquet.write_table(table, out, compression="zstd", use_dictionary=False)
        return bytes(out.getvalue())

    def write(self, directory: Path) -> None:
        """Put it into `directory`, whole or not at all."""
        directory.mkdir(exist_ok=True)
        write_atomic(shard_path(directory, self.iteration), self.to_bytes())


def shard_path(directory: Path, iteration: int) -> Path:
    """Where the shard of an iteration lies in a ledger."""
    return directory / f"{iteration:0{DIGITS}d}.parquet"


def iterations(directory: Path) -> list[int]:
    """The iterations that a ledger has, in order."""
    names = (re.fullmatch(rf"(\d{{{DIGITS},}})\.parquet", path.name) for path in directory.glob("*.parquet"))
    return sorted(int(name[1]) for name in names if name)


def read_shard(path: Path) -> Shard:
    """The shard that `Shard.write` wrote. Raises ValueError where it is none, or damaged."""
    try:
        table = parquet.read_table(path, partitioning=None)
        about = table.schema.metadata or {}
        policy = about[b"policy"].decode() if b"policy" in about else None
        return Shard(int(about[b"iteration"]), policy, table)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: damaged, or not a shard of a ledger ({reason})") from error


def lists(column: Ragged, type: pa.DataType) -> pa.Array:
    """A ragged column as lists without nulls."""
    item = pa.field("item", type, nullable=False)
    return pa.ListArray.from_arrays(column.offsets.astype(np.int32), pa.array(column.values, type), pa.list_(item))


def sources_of(table: pa.Table) -> list[str]:
    """The sources of reward that scored, in the config's order."""
    return [name.removeprefix(SCORE) for name in table.column_names if name.startswith(SCORE)]


@dataclass(frozen=True)
class Query:
    """Which rows are wanted."""

    iterations: Sequence[int] = ()
    """None named: all."""
    source: str | None = None
    """Rows that this source applies to; the fields below then are about its score, not about the reward."""
    min_reward: float | None = None
    max_reward: float | None = None
    failed: bool = False
    """Rows of which the source, or where none is named any, should have given a score and did not."""
    unused: bool = False
    """Rows that no update was made with."""

    def select(self, table: pa.Table) -> pa.Table:
        """The wanted rows. Raises ValueError where the shard has no such source."""
        sources = sources_of(table)
        if self.source is not None and self.source not in sources:
            raise ValueError(f"{self.source!r} is not allowed: must be one of {', '.join(map(repr, sources))}")
        asked = [self.source] if self.source is not None else sources
        wanted = np.ones(len(table), bool)
        if self.source is not None:
            wanted &= table[SCORE + self.source].is_valid().to_numpy()
        # Where there is no reward it is neither high nor low: NaN compares false.
        value = _floats(table["reward" if self.source is None else SCORE + self.source])
        if self.min_reward is not None:
            wanted &= value >= self.min_reward
        if self.max_reward is not None:
            wanted &= value <= self.max_reward
        if self.failed:
            wanted &= np.any([pc.is_nan(table[SCORE + s]).fill_null(False).to_numpy() for s in asked], axis=0)
        if self.unused:
            wanted &= table["times_trained"].to_numpy() == 0
        return table.filter(pa.array(wanted))


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    found: np.ndarray = pc.fill_null(column, np.nan).to_numpy()
    return found


def readable(table: pa.Table, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Rows as people read them: texts, scores, the mean advantage of the reply's tokens, what became of it.

    Args:
        tokenizer: the policy's.
    """
    hashed = "reply_hash" in table.column_names
    texts: dict[str, list[str]] = {}
    for said, ids in (("prompt", "prompt_ids"), ("reply", "reply_ids")):
        if hashed:
            texts[said] = [f"#{digest}" for digest in table[f"{said}_hash"].to_pylist()]
        else:
            texts[said] = decode_replies(tokenizer, table[ids].to_pylist())
    if not hashed and "response_mask" in table.column_names:
        rows = zip(*(table[name].to_pylist() for name in OF_EPISODES), strict=True)
        texts["reply"] = [transcript(tokenizer, np.array(ids), np.array(sampled)) for ids, sampled in rows]
    columns = [name for name in table.column_names if not pa.types.is_list(table[name].type)]
    for number, row in enumerate(table.select(columns).to_pylist()):
        if hashed:
            advantage = row["advantages_mean"]
        else:
            of_tokens = table["advantages"][number].as_py()
            advantage = float(np.mean(of_tokens)) if of_tokens else None
        scores = {name.removeprefix(SCORE): row[name] for name in columns if name.startswith(SCORE)}
        yield {
            **{name: row[name] for name in ("iteration", "row", "round")},
            "prompt_row": row["prompt"],
            "prompt": texts["prompt"][number],
            "reply": texts["reply"][number],
            "scores": {source: "failed" if score != score else score for source, score in scores.items()},
            "failures": {n.removeprefix(FAILURE): row[n] for n in columns if n.startswith(FAILURE) and row[n]},
            GOLD: row.get(GOLD),
            **{name: row[name] for name in ("reward", "scaled_reward")},
            "advantage": advantage,
            "used": _used(row),
            **{name: row[name] for name in ("times_trained", "version", "seed", "ended")},
        }


def reply_texts(table: pa.Table, tokenizer: Any) -> list[str]:
    """What the policy itself said in each row, as the rewards were given it; tokens are not hashed."""
    if "response_mask" not in table.column_names:
        return decode_replies(tokenizer, table["reply_ids"].to_pylist())
    rows = zip(*(table[name].to_pylist() for name in OF_EPISODES), strict=True)
    return [own_text(tokenizer, np.array(ids), np.array(sampled)) for ids, sampled in rows]


def _used(row: Mapping[str, Any]) -> str:
    if row["times_trained"]:
        return "yes"
    if row["reward"] is None:
        return "no: no reward"
    return "no: others took its place" if row["scaled_reward"] is None else "no: updates ended early"


@dataclass(frozen=True)
class Difference:
    """The first place where what was published and what is computed again are not the same."""

    iteration: int | None
    """None: of the checkpoint as a whole."""
    row: int | None
    """None: the shards as a whole differ."""
    column: str
    recorded: str
    recomputed: str

    def __str__(self) -> str:
        if self.iteration is None:
            return f"{self.column}: {self.recorded} in the checkpoint, {self.recomputed} computed again"
        place = f"iteration {self.iteration}" + (f", row {self.row}" if self.row is not None else "")
        return f"{place}, {self.column}: {self.recorded} in the ledger, {self.recomputed} computed again"


def first_difference(recorded: Shard, recomputed: Shard) -> Difference | None:
    """Where two shards of one iteration differ first: by row, then by column."""
    number, left, right = recomputed.iteration, recorded.table, recomputed.table
    if left.schema.remove_metadata() != right.schema.remove_metadata():
        names = (", ".join(f"{field.name} {field.type}" for field in table.schema) for table in (left, right))
        return Difference(number, None, "columns", *names)
    if len(left) != len(right):
        return Difference(number, None, "rows", str(len(left)), str(len(right)))
    for old, new in zip(left.to_pylist(), right.to_pylist(), strict=True):
        for name in left.column_names:
            # As texts: NaN is itself, and 0.0 is not −0.0.
            if repr(old[name]) != repr(new[name]):
                return Difference(number, new["row"], *_where(name, old[name], new[name]))
    abouts = {"iteration": (recorded.iteration, recomputed.iteration), "policy": (recorded.policy, recomputed.policy)}
    for name, (old, new) in abouts.items():
        if old != new:
            return Difference(number, None, name, str(old), str(new))
    return None


def _where(name: str, old: Any, new: Any) -> tuple[str, str, str]:
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return name, f"{len(old)} tokens", f"{len(new)} tokens"
        token = next(i for i, pair in enumerate(zip(old, new, strict=True)) if repr(pair[0]) != repr(pair[1]))
        return f"{name} of token {token}", repr(old[token]), repr(new[token])
    return name, repr(old), repr(new)


def table_of(columns: Mapping[str, Any]) -> pa.Table:
    """Columns, each a pyarrow array or a numpy one."""
    return pa.table({n: c if isinstance(c, pa.Array) else pa.array(c) for n, c in columns.items()})
