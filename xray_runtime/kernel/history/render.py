"""The lineage of a checkpoint as text, as JSON, and as a flowchart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from xray_runtime.kernel.history.graph import CheckpointGraph, Node

MAX_INDENT = 16
"""Levels shown by indentation; deeper ones show a number, so that the text stays linear in the checkpoints."""

MAX_VALUE_CHARS = 120
MAX_MERMAID = 150
"""Boxes of a flowchart, which a browser lays out and a person reads."""


def printable(text: str) -> str:
    """`text` with control characters escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def lineage_text(graph: CheckpointGraph, node: Node, descendants: bool) -> Iterator[str]:
    """The tree of ancestors, then that of descendants. A repeated checkpoint is expanded the first time."""
    yield from _tree(graph, node.sha256, up=True)
    if descendants:
        yield ""
        yield f"made from {printable(node.name)}:"
        yield from _tree(graph, node.sha256, up=False)


def _tree(graph: CheckpointGraph, start: str, *, up: bool) -> Iterator[str]:
    seen: set[str] = set()
    pending: list[tuple[int, str, str]] = [(0, "", start)]
    while pending:
        level, role, sha = pending.pop()
        shown = f"[{level}] " if level > MAX_INDENT else ""
        node = graph.nodes.get(sha)
        name = printable(node.name) if node else f"{sha[:12]} (not in the store)"
        line = f"{'  ' * min(level, MAX_INDENT)}{shown}{role + ': ' if role else ''}{name}"
        following = graph.parents(sha) if up else sorted(graph.children.get(sha, []))
        if sha in seen:
            yield line + (" (see above)" if following else "")
            continue
        seen.add(sha)
        yield line + _summary(node)
        grouped: dict[str, list[str]] = {}
        for other_role, other in following:
            grouped.setdefault(other, []).append(other_role)
        pending += [(level + 1, "+".join(roles), other) for other, roles in reversed(grouped.items())]


def _summary(node: Node | None) -> str:
    results = node.results if node else {}
    shown = [f"{k} {results[k]:.3g}" for k in ("win_rate", "kl", "accuracy") if isinstance(results.get(k), int | float)]
    shown += [
        f"{results[k]:,} {k}" for k in ("pairs", "train_pairs", "heldout_pairs") if isinstance(results.get(k), int)
    ]
    return f"  ({', '.join(shown)})" if shown else ""


def lineage_mermaid(graph: CheckpointGraph, node: Node) -> Iterator[str]:
    """The graph as a Mermaid flowchart for Prefect's pages; only the nearest MAX_MERMAID checkpoints."""
    chosen = selection(graph, node, False)[-MAX_MERMAID:]
    names = {sha: f"n{number}" for number, sha in enumerate(chosen)}
    yield "flowchart LR"
    for sha, name in names.items():
        # Quotes would end the label; Mermaid and the page read the rest as text.
        stage = re.sub(r"[^\w .-]", "?", stage_name(graph, sha))
        yield f'  {name}["{stage}<br/>{sha[:12]}"]'
    for sha, name in names.items():
        roles: dict[str, list[str]] = {}
        for role, parent in graph.parents(sha):
            roles.setdefault(parent, []).append(re.sub(r"[^\w.-]", "?", role))
        yield from (f"  {names[parent]} -->|{', '.join(r)}| {name}" for parent, r in roles.items() if parent in names)


def selection(graph: CheckpointGraph, node: Node, descendants: bool) -> list[str]:
    """Digests to show, parents first."""
    chosen = graph.ancestors([node.sha256])
    if descendants:
        chosen = graph.ancestors([*chosen, *graph.descendants([node.sha256])])
    return chosen


def lineage_json(graph: CheckpointGraph, node: Node, descendants: bool) -> dict[str, Any]:
    """`checkpoints`, parents first, each with its parents by role; a missing one has `directory: null`."""
    return {"of": node.sha256, "checkpoints": [entry(graph, sha) for sha in selection(graph, node, descendants)]}


def entry(graph: CheckpointGraph, sha: str) -> dict[str, Any]:
    """The facts about a checkpoint, for programs."""
    node = graph.nodes.get(sha)
    if node is None:
        return {"sha256": sha, "directory": None}
    manifest, statement = node.manifest, node.statement
    run = statement.predicate.details if statement else None
    return {
        "sha256": sha,
        "directory": str(node.directory),
        "stage": manifest.stage,
        "kind": manifest.kind,
        "type": manifest.type,
        "step": manifest.step,
        "seed": manifest.seed,
        "parents": manifest.parents,
        "results": node.results,
        "finished": run.metadata.finished if run else None,
        "git_commit": statement.predicate.build.internal.code.git_commit if statement else None,
        "mlflow_run_id": run.run.mlflow_run_id if run else None,
    }


def stage_name(graph: CheckpointGraph, sha: str) -> str:
    """The stage that made a checkpoint, or `missing`."""
    return graph.nodes[sha].manifest.stage if sha in graph.nodes else "missing"
