"""The rollouts in a checkpoint's ledger that match a query, as text: all of them, or a page, also by reward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import pyarrow as pa

from xray_runtime.data.ledger import SCORE, LedgerShard, Query, iterations, read_shard, readable, shard_path, sources_of
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.store.damage import check_file
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import LEDGER

Order = Literal["row", "lowest", "highest", "prompt"]
"""As in the ledger; by the reward (or the score of the query's source), rows without one last; or by prompt, whose
replies are then together."""
PLACE = "place"


@dataclass
class QueryResult:
    """The result of a query."""

    rows: list[dict[str, Any]]
    """`data.ledger.readable`, up to the limit."""
    total: int
    """Rows that match."""
    changed: list[str]
    """Files of the ledger that were changed since they were published."""


def require_ledger(node: Node, *wanted: int) -> list[int]:
    """The iterations whose rollouts a checkpoint has. Raises ConfigError where it has none, or lacks a wanted one."""
    found = iterations(node.directory / LEDGER)
    if not found:
        raise ConfigError(
            f"REF: {node.name} is not allowed: it has no ledger; must be a stage of kind 'ppo' whose ledger.keep is "
            "not 'none'"
        )
    for iteration in wanted:
        if iteration not in found:
            raise ConfigError(f"--iteration: {iteration} is not allowed: must be one of {found[0]} to {found[-1]}")
    return found


def checked_order(value: str) -> Order:
    """The value of `--order`. Raises ConfigError for anything but an `Order`."""
    if value not in get_args(Order):
        raise ConfigError(f"--order: {value!r} is not allowed: must be one of {', '.join(get_args(Order))}")
    return cast(Order, value)


class Selection:
    """The rows of a checkpoint's ledger that match `query`: where they are. Tokens are read for a page of them only,
    or, to find `text` in prompts and replies, of all.

    Raises ConfigError where there is no ledger, an iteration or source is not in it, or a file is damaged.
    """

    def __init__(self, node: Node, query: Query, order: Order, text: str = "") -> None:
        kept = require_ledger(node, *query.iterations)
        listed = {entry.path: entry for entry in node.manifest.files}
        self._node = node
        self.changed: list[str] = []
        self.sources: list[str] = []
        column = "reward" if query.source is None else SCORE + query.source
        shards, places, values = [], [], []
        for number in query.iterations or kept:
            path = shard_path(node.directory / LEDGER, number)
            name = f"{LEDGER}/{path.name}"
            if name not in listed or check_file(node.directory, listed[name], file_sha256) is not None:
                self.changed.append(name)
            table = read_iteration(node, number, lists=False).table
            table = table.append_column(PLACE, pa.array(range(len(table)), pa.int64()))
            try:
                table = query.select(table)
            except ValueError as error:
                raise ConfigError(f"--source: {error}") from None
            self.sources = sources_of(table)
            shards.append(np.full(len(table), number))
            places.append(table[PLACE].to_numpy())
            values.append(np.full(len(table), np.nan) if order == "row" else _values(table, column))
            if order == "prompt":
                values[-1] = table["prompt"].to_numpy().astype(float)
        found = np.stack([np.concatenate(shards), np.concatenate(places)], axis=1)
        # Stable, so that equal rewards keep the ledger's order; NaN comes last.
        by = np.concatenate(values) * (-1 if order == "highest" else 1)
        self._rows = found if order == "row" else found[np.argsort(by, kind="stable")]
        if text:
            self._rows = self._rows[[text.casefold() in _searched(row) for row in _as_text(node, self._rows)]]

    def __len__(self) -> int:
        return len(self._rows)

    def page(self, start: int, limit: int | None) -> QueryResult:
        """The rows from `start` on as text, `limit` of them at most."""
        wanted = self._rows[start : None if limit is None else start + limit]
        return QueryResult(_as_text(self._node, wanted), len(self), self.changed)


def _searched(row: dict[str, Any]) -> str:
    return f"{row['prompt']}\n{row.get('reasoning', '')}\n{row['reply']}".casefold()


@lru_cache(maxsize=4)
def policy_tokenizer(directory: Path) -> Any:
    from xray_runtime.models.causal_lm import load_tokenizer

    return load_tokenizer(directory)


def _as_text(node: Node, rows: np.ndarray) -> list[dict[str, Any]]:
    """Rows, each (iteration, place in its shard), as `data.ledger.readable`."""
    texts: dict[tuple[int, int], dict[str, Any]] = {}
    for number in np.unique(rows[:, 0]).tolist():
        places = rows[rows[:, 0] == number, 1].tolist()
        table = read_iteration(node, number).table.take(pa.array(places))
        texts |= {
            (number, p): row for p, row in zip(places, readable(table, policy_tokenizer(node.directory)), strict=True)
        }
    return [texts[number, place] for number, place in rows.tolist()]


def read_iteration(node: Node, number: int, *, lists: bool = True) -> LedgerShard:
    """The shard of an iteration. Raises ConfigError if it is damaged."""
    try:
        return read_shard(shard_path(node.directory / LEDGER, number), lists=lists)
    except ValueError as error:
        raise ConfigError(f"REF: {node.name}: {error}") from None


def _values(table: pa.Table, column: str) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in table[column].to_pylist()], float)


@dataclass(frozen=True)
class IterationDiff:
    """Two iterations beside each other."""

    summary: list[dict[str, float | int]]
    """For each: `iteration`, `rows`, `mean`, `lowest` and `highest` reward; NaN without one."""
    total: int
    """Prompts that both have."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]]
    """The first reply of each iteration to one prompt (`data.ledger.readable`), by the change of the reward."""


def same_prompts(one: Node, other: Node) -> bool:
    """Whether two policies learned from the prompts of one dataset, whose rows the ledgers number."""
    return one.manifest.parents.get("prompts") == other.manifest.parents.get("prompts")


def diff_iterations(node: Node, first: int, second: int, limit: int | None, other: Node | None = None) -> IterationDiff:
    """The change from one iteration to another: of the rewards, and of the replies to the prompts of both.

    Args:
        other: the policy of the second iteration; None: the same one.

    Raises ConfigError where an iteration is not in the ledger, a file is damaged, or the two had other prompts.
    """
    other = other or node
    if not same_prompts(node, other):
        raise ConfigError(f"with: {other.name} is not allowed: its prompts are of another dataset than {node.name}'s")
    of = [(node, first), (other, second)]
    for each, number in of:
        require_ledger(each, number)
    tables = [read_iteration(each, number, lists=False).table for each, number in of]
    rewards = [_values(table, "reward") for table in tables]
    summary = []
    for number, found in zip((first, second), rewards, strict=True):
        known = found[~np.isnan(found)]
        numbers = (known.mean(), known.min(), known.max()) if len(known) else (np.nan,) * 3
        named = dict(zip(("mean", "lowest", "highest"), map(float, numbers), strict=True))
        summary.append({"iteration": number, "rows": len(found), **named})
    # The first row of each prompt.
    places = [{p: i for i, p in reversed(list(enumerate(table["prompt"].to_pylist())))} for table in tables]
    common = sorted(places[0].keys() & places[1].keys())
    change = [rewards[1][places[1][p]] - rewards[0][places[0][p]] for p in common]
    chosen = [common[i] for i in np.argsort(change, kind="stable")][:limit]
    sides = []
    for (each, number), place in zip(of, places, strict=True):
        rows = np.array([[number, place[prompt]] for prompt in chosen], dtype=np.int64)
        sides.append(_as_text(each, rows.reshape(-1, 2)))
    return IterationDiff(summary, len(common), list(zip(*sides, strict=True)))
