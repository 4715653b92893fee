"""The rollouts in a checkpoint's ledger that match a query, as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from xray_runtime.config.validation import ConfigError
from xray_runtime.data.ledger import Query, iterations, read_shard, readable, shard_path
from xray_runtime.lineage.graph import Node
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import LEDGER


@dataclass
class QueryResult:
    """The result of a query."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """`data.ledger.readable`, up to the limit."""
    total: int = 0
    """Rows that match."""
    changed: list[str] = field(default_factory=list)
    """Files of the ledger that were changed since they were published."""


def require_ledger(node: Node) -> list[int]:
    """The iterations whose rollouts a checkpoint has. Raises ConfigError where it has none."""
    found = iterations(node.directory / LEDGER)
    if not found:
        raise ConfigError(
            f"REF: {node.name} is not allowed: it has no ledger; must be a stage of kind 'ppo' whose ledger.keep is "
            "not 'none'"
        )
    return found


def require_iteration(iteration: int, kept: list[int]) -> None:
    """Raises ConfigError where an iteration is not among those `kept`."""
    if iteration not in kept:
        raise ConfigError(f"--iteration: {iteration} is not allowed: must be one of {kept[0]} to {kept[-1]}")


def find_rollouts(node: Node, query: Query, limit: int | None) -> QueryResult:
    """The rows of a checkpoint's ledger that match `query`, in order; the first `limit` of them as text.

    Raises:
        ConfigError: it has no ledger, an iteration or a source that is asked for is not in it, or a file is damaged.
    """
    from xray_runtime.models.causal_lm import load_tokenizer

    kept, found, tokenizer = require_ledger(node), QueryResult(), None
    for iteration in query.iterations:
        require_iteration(iteration, kept)
    listed = {entry.path: entry.sha256 for entry in node.manifest.files}
    for number in query.iterations or kept:
        path = shard_path(node.directory / LEDGER, number)
        name = f"{LEDGER}/{path.name}"
        if file_sha256(path) != listed.get(name):
            found.changed.append(name)
        try:
            table = read_shard(path).table
        except ValueError as error:
            raise ConfigError(f"REF: {node.name}: {error}") from None
        try:
            table = query.select(table)
        except ValueError as error:
            raise ConfigError(f"--source: {error}") from None
        found.total += len(table)
        table = table if limit is None else table.slice(0, max(limit - len(found.rows), 0))
        if len(table):
            tokenizer = tokenizer or load_tokenizer(node.directory)
            found.rows += readable(table, tokenizer)
    return found
