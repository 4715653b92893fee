"""The files of the rollout ledger: one Parquet shard per iteration, one row per reply.

`data.columns` lists the columns. Replaced rows come last. If tokens are hashed, `answers` is absent and each list
column C is replaced by `C_hash`, a salted digest of the row, and, for numbers, `C_mean`. Equal rollouts give equal
bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from xray_runtime.data.agent_conversations import conversation, conversation_text
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.reasoning import split_reasoning
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.data.tokenizing import decode_prompts, decode_replies, decode_reply, own_text, transcript
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.files import write_atomic

TOKENS = ("prompt_ids", "reply_ids")
NUMBERS = (
    *("rollout_logprobs", "logprobs", "entropy", "ref_logprobs", "teacher_logprobs", "kept_mass"),
    *("advantages", "weights"),
)
"""List columns: token ids, and numbers per token of the reply."""
ROUTES = ("route_ids", "route_weights")
"""List columns of prompt and reply, whose items are lists too: one for each expert of a token, layer by layer."""
TOP = ("topk_ids", "topk_logprobs")
KEPT = "kept_ids"
NESTED = (*ROUTES, *TOP, KEPT)
"""List columns whose items are lists: with `TOP` one for each likeliest token, with `KEPT` for each of the kept set."""
ANSWERS = "answers"
OF_EPISODES = ("reply_ids", "response_mask")
GOLD = "gold"
SCORE, FAILURE = "score/", "failure/"
"""Prefixes of column names; a source of reward follows."""
DIGITS = 6


@dataclass(frozen=True)
class LedgerShard:
    """The rollouts of one iteration."""

    iteration: int
    policy: str | None
    """Digest of the trained weights that the generator loaded before the rollout. None: none were sent (before the
    first update the policy equals its parent, unless `lora.quantize` rounds it), or they were sent from GPU to GPU
    without a digest."""
    table: pa.Table
    dropped: tuple[int, ...] = ()
    """Numbers of the groups in flight that the iteration gave up (`oversample`)."""

    def to_bytes(self) -> bytes:
        """The shard's file as bytes."""
        about = {"iteration": str(self.iteration)} | ({"policy": self.policy} if self.policy else {})
        about |= {"dropped": json.dumps(self.dropped)} if self.dropped else {}
        out = pa.BufferOutputStream()
        # Numbers rarely repeat: dictionary encoding would take five times as long and half as much space again.
        table = self.table.replace_schema_metadata(about)
        parquet.write_table(table, out, compression="zstd", use_dictionary=False)
        return bytes(out.getvalue())

    def write(self, directory: Path) -> None:
        """Write it into `directory` atomically."""
        directory.mkdir(exist_ok=True)
        write_atomic(shard_path(directory, self.iteration), self.to_bytes())


def shard_path(directory: Path, iteration: int) -> Path:
    """The path of an iteration's shard in a ledger."""
    return directory / f"{iteration:0{DIGITS}d}.parquet"


def iterations(directory: Path) -> list[int]:
    """The iterations in a ledger, in order."""
    names = (re.fullmatch(rf"(\d{{{DIGITS},}})\.parquet", path.name) for path in directory.glob("*.parquet"))
    return sorted(int(name[1]) for name in names if name)


def read_shard(path: Path, *, lists: bool = True) -> LedgerShard:
    """Read a shard; with `lists`, also its columns of tokens and of numbers per token. Raises ValueError if the file is
    not a shard or is damaged."""
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path}: missing, or not a file")
    try:
        columns = None
        if not lists:
            schema = parquet.read_schema(path)
            columns = [field.name for field in schema if not pa.types.is_list(field.type) and field.name != ANSWERS]
        table = parquet.read_table(path, columns=columns, partitioning=None)
        about = table.schema.metadata or {}
        policy = about[b"policy"].decode() if b"policy" in about else None
        return LedgerShard(int(about[b"iteration"]), policy, table, tuple(json.loads(about.get(b"dropped", b"[]"))))
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(f"{path}: damaged, or not a shard of a ledger ({reason})") from error


def answered_iterations(directory: Path, last: int) -> Iterator[tuple[int, pa.Table]]:
    """(iteration, its rows in order) of each shard up to `last` that has the answers of environments or agents. Raises
    ValueError if a shard is damaged."""
    for number in iterations(directory):
        if number > last:
            return
        table = read_shard(shard_path(directory, number)).table
        if ANSWERS in table.column_names:
            yield number, table.sort_by("row")


def lists(column: Ragged, type: pa.DataType) -> pa.Array:
    """A ragged column as lists without nulls."""
    item = pa.field("item", type, nullable=False)
    return pa.ListArray.from_arrays(column.offsets.astype(np.int32), pa.array(column.values, type), pa.list_(item))


def lists_of_lists(column: Ragged) -> pa.Array:
    """A ragged column whose rows hold arrays of one shape, each as one list."""
    flat = np.ascontiguousarray(column.values).reshape(len(column.values), -1)
    item = pa.field("item", pa.from_numpy_dtype(flat.dtype), nullable=False)
    items = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), type=pa.list_(item, flat.shape[1]))
    return pa.ListArray.from_arrays(
        column.offsets.astype(np.int32), items, pa.list_(pa.field("item", items.type, nullable=False))
    )


def lists_of_sets(column: Ragged, counts: Ragged) -> pa.Array:
    """The items of each place, `counts` of them, as a list each."""
    ends = np.cumsum([0, *counts.values], dtype=np.int64)
    items = lists(Ragged(column.values, ends), pa.from_numpy_dtype(column.values.dtype))
    item = pa.field("item", items.type, nullable=False)
    return pa.ListArray.from_arrays(counts.offsets.astype(np.int32), items, pa.list_(item))


def sources_of(table: pa.Table) -> list[str]:
    """The sources of reward in the shard, in the config's order."""
    return [name.removeprefix(SCORE) for name in table.column_names if name.startswith(SCORE)]


@dataclass(frozen=True)
class Query:
    """A selection of rows."""

    iterations: Sequence[int] = ()
    """Empty: all."""
    source: str | None = None
    """Only rows that this source applies to; the fields below then refer to its score, not to the reward."""
    min_reward: float | None = None
    max_reward: float | None = None
    failed: bool = False
    """Only rows for which the source, or any source if none is named, failed."""
    unused: bool = False
    """Only rows that no update used."""

    def select(self, table: pa.Table) -> pa.Table:
        """The selected rows. Raises ValueError if the shard has no such source."""
        sources, column, wanted = sources_of(table), table["reward"], np.ones(len(table), bool)
        if self.source is not None:
            if self.source not in sources:
                raise ValueError(f"{self.source!r} is not allowed: must be one of {', '.join(map(repr, sources))}")
            sources, column = [self.source], table[SCORE + self.source]
            wanted &= column.is_valid().to_numpy()
        # A missing reward is NaN, which compares false with both bounds.
        value: np.ndarray = pc.fill_null(column, np.nan).to_numpy()
        if self.min_reward is not None:
            wanted &= value >= self.min_reward
        if self.max_reward is not None:
            wanted &= value <= self.max_reward
        if self.failed:
            wanted &= np.any([pc.is_nan(table[SCORE + s]).fill_null(False).to_numpy() for s in sources], axis=0)
        if self.unused:
            wanted &= table["times_trained"].to_numpy() == 0
        return table.filter(pa.array(wanted))


def readable(table: pa.Table, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Readable rows: texts, scores, the mean advantage of the reply's tokens, and whether the row was used. The reply
    of an agent's episode is its conversation, also as `calls`. The tokenizer is the policy's."""
    hashed = "reply_hash" in table.column_names
    if hashed:
        prompts, replies = ([f"#{digest}" for digest in table[f"{of}_hash"].to_pylist()] for of in ("prompt", "reply"))
    else:
        prompts = decode_prompts(tokenizer, table["prompt_ids"].to_pylist())
        replies = reply_texts(table, tokenizer, transcript)
    calls, is_episode = _agent_calls(table, tokenizer), hashed or "response_mask" in table.column_names
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
            "prompt": prompts[number],
            **_shown_reply(replies[number] if (called := calls[number]) is None else called[1], is_episode),
            "scores": {source: "failed" if score != score else score for source, score in scores.items()},
            "failures": {n.removeprefix(FAILURE): row[n] for n in columns if n.startswith(FAILURE) and row[n]},
            GOLD: row.get(GOLD),
            **{name: row[name] for name in ("reward", "scaled_reward")},
            "advantage": advantage,
            "used": _used(row),
            **{name: row[name] for name in ("times_trained", "version", "seed", "ended")},
            **({"drawn": row["drawn"]} if "drawn" in row else {}),
            **({} if called is None else {"calls": called[0]}),
        }


def _shown_reply(text: str, is_episode: bool) -> dict[str, str]:
    """`reply`, and `reasoning` where the reply has some; an episode stays whole, since each turn may reason."""
    reasoning, answer = (None, text) if is_episode else split_reasoning(text)
    return {"reply": answer} if reasoning is None else {"reasoning": reasoning, "reply": answer}


def _agent_calls(table: pa.Table, tokenizer: Tokenizer) -> list[tuple[list[dict[str, Any]], str] | None]:
    """The calls of each row that is an agent's episode, and their text."""
    if ANSWERS not in table.column_names:
        return [None] * len(table)
    found: list[tuple[list[dict[str, Any]], str] | None] = []
    for version, text in zip(table["version"].to_pylist(), table[ANSWERS].to_pylist(), strict=True):
        record = json.loads(text)
        if not isinstance(record, dict):  # an environment's answers
            found.append(None)
            continue
        calls = conversation(record, partial(decode_reply, tokenizer), version)
        found.append((calls, conversation_text(record, calls)))
    return found


def reply_texts(
    table: pa.Table, tokenizer: Tokenizer, text_of: Callable[[Any, np.ndarray, np.ndarray], str] = own_text
) -> list[str]:
    """The policy's own text in each row, as the rewards received it, or what `text_of` makes of an episode's tokens and
    of which of them were sampled; tokens must not be hashed."""
    if "response_mask" not in table.column_names:
        return decode_replies(tokenizer, table["reply_ids"].to_pylist())
    rows = zip(*(table[name].to_pylist() for name in OF_EPISODES), strict=True)
    return [text_of(tokenizer, np.array(ids), np.array(sampled)) for ids, sampled in rows]


def _used(row: Mapping[str, Any]) -> str:
    if row["times_trained"]:
        return "yes"
    if row["reward"] is None:
        return "no: no reward"
    return "no: it was replaced" if row["scaled_reward"] is None else "no: updates ended early"


@dataclass(frozen=True)
class Difference:
    """The first difference between what was published and what is computed again."""

    iteration: int | None
    """None: of the checkpoint as a whole."""
    row: int | None
    """None: the difference is not in one row."""
    column: str
    recorded: str
    recomputed: str

    def __str__(self) -> str:
        if self.iteration is None:
            return f"{self.column}: {self.recorded} in the checkpoint, {self.recomputed} computed again"
        position = f"iteration {self.iteration}" + (f", row {self.row}" if self.row is not None else "")
        return f"{position}, {self.column}: {self.recorded} in the ledger, {self.recomputed} computed again"


def first_difference(recorded: LedgerShard, recomputed: LedgerShard) -> Difference | None:
    """The first difference between two shards of one iteration, by row, then by column."""
    number, left, right = recomputed.iteration, recorded.table, recomputed.table
    if left.schema.remove_metadata() != right.schema.remove_metadata():
        names = (", ".join(f"{field.name} {field.type}" for field in table.schema) for table in (left, right))
        return Difference(number, None, "columns", *names)
    if len(left) != len(right):
        return Difference(number, None, "rows", str(len(left)), str(len(right)))
    for old, new in zip(left.to_pylist(), right.to_pylist(), strict=True):
        for name in left.column_names:
            # Compare as text, so that NaN equals itself and 0.0 differs from −0.0.
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
