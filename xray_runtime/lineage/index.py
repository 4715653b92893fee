"""Where each checkpoint of a store lies, so that the lineage of one does not read all manifests there are.

The index says where to look; what is found there is read, and counts only if it is the checkpoint that was looked for.
What the index does not know, or knows wrongly, is looked for in the manifests, and the index is made anew. It is for
showing where a checkpoint came from: audits, promotion and pruning read every manifest themselves.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.lineage.graph import Graph, Node, checkpoint_entries
from xray_runtime.store.checkpoints import CHECKPOINTS, read_manifest

INDEX = "checkpoints.sqlite"
"""In the output directory. It can be removed at any time."""


def read_history(output: Path, reference: str) -> tuple[Graph, Node] | None:
    """The checkpoint of this sha256 (or its start), stage or directory name, with all it came from.

    None where `reference` names nothing or several, or anything behind it is missing: whoever reads all manifests can
    say more.
    """
    try:
        with _open(output) as index:
            _refresh(index, output / CHECKPOINTS)
            return _history(index, output / CHECKPOINTS, reference)
    # A disk that is full, a directory that cannot be written to, a file that is no index.
    except (sqlite3.Error, OSError):
        return None


def remember(output: Path, graph: Graph) -> None:
    """Make the index anew from all manifests."""
    with contextlib.suppress(sqlite3.Error, OSError):
        (output / INDEX).unlink(missing_ok=True)
        with _open(output) as index:
            _insert(index, [*graph.nodes.values(), *graph.duplicates])


@contextlib.contextmanager
def _open(output: Path) -> Iterator[sqlite3.Connection]:
    path = output / INDEX
    if path.is_symlink():
        raise OSError(f"{path} is a link")
    with contextlib.closing(sqlite3.connect(path)) as index, index:
        index.execute("PRAGMA synchronous = OFF")
        index.execute("CREATE TABLE IF NOT EXISTS checkpoints (name TEXT PRIMARY KEY, sha256 TEXT, stage TEXT)")
        for column in ("sha256", "stage"):
            index.execute(f"CREATE INDEX IF NOT EXISTS by_{column} ON checkpoints ({column})")
        yield index


def _refresh(index: sqlite3.Connection, store: Path) -> None:
    """Add the directories that are new, and forget those that are gone."""
    there = {entry.name for entry in checkpoint_entries(store) if not entry.is_symlink()}
    known = {name for (name,) in index.execute("SELECT name FROM checkpoints")}
    index.executemany("DELETE FROM checkpoints WHERE name = ?", [(name,) for name in known - there])
    for name in there - known:
        # What cannot be read is nobody's ancestor; an audit names it.
        with contextlib.suppress(ValueError):
            manifest, sha256 = read_manifest(store / name)
            _insert(index, [Node(sha256, store / name, manifest)])


def _insert(index: sqlite3.Connection, nodes: list[Node]) -> None:
    rows = [(os.fsencode(n.directory.name).decode("utf-8", "replace"), n.sha256, n.manifest.stage) for n in nodes]
    index.executemany("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", rows)


def _history(index: sqlite3.Connection, store: Path, reference: str) -> tuple[Graph, Node] | None:
    if re.fullmatch(r"[0-9a-f]{6,64}", reference):
        start = _only(index, store, "sha256 >= ? AND sha256 < ?", reference, reference + "g")
    else:
        start = _only(index, store, "name = ? OR stage = ?", reference, reference)
    if start is None:
        return None
    nodes, pending = {start.sha256: start}, [start]
    while pending:
        for sha256 in pending.pop().manifest.parents.values():
            if sha256 not in nodes:
                parent = _only(index, store, "sha256 = ?", sha256)
                if parent is None:
                    return None
                nodes[sha256] = parent
                pending.append(parent)
    return Graph(nodes), start


def _only(index: sqlite3.Connection, store: Path, condition: str, *values: str) -> Node | None:
    """The one checkpoint of a condition; None where the index has none, several, or another than lies there."""
    rows = index.execute(f"SELECT name, sha256 FROM checkpoints WHERE {condition} LIMIT 2", values).fetchall()
    if len(rows) != 1:
        return None
    ((name, expected),) = rows
    try:
        manifest, sha256 = read_manifest(store / name)
    except ValueError:
        return None
    return Node(sha256, store / name, manifest) if sha256 == expected else None
