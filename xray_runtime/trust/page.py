"""The lineage of a checkpoint as one HTML page: a clickable graph, and the facts about each box."""

from __future__ import annotations

import base64
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.history.render import MAX_VALUE_CHARS, entry, stage_name
from xray_runtime.kernel.report.figures import panels_of, read_metrics
from xray_runtime.kernel.report.rendering import template
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, read_bounded
from xray_runtime.kernel.tracking.mlflow_tracker import flatten
from xray_runtime.kernel.tracking.recorder import CURVES, METRICS, records_directory
from xray_runtime.methods.common.findings import monitored
from xray_runtime.trust.diff import changed

MAX_SAMPLES = 24
"""Conversations shown of each evaluation."""


def write_html(path: Path, store: LineageStore, node: Node, chosen: list[str]) -> None:
    """One self-contained page: a graph whose boxes lead to the facts, curves and samples of each checkpoint.

    Args:
        chosen: digests of the checkpoints to show, parents first.
    """
    graph = store.graph
    siblings = _siblings(graph, chosen)
    shown = set(chosen)
    sections = [_section(store, sha, siblings.get(sha), shown) for sha in chosen]
    sources = node.statement.predicate.build.internal.sources if node.statement else []
    stream = template("lineage.html").stream(of=node, graph=drawing(graph, chosen), sections=sections, sources=sources)
    temporary = path.with_name(f"{path.name}.writing")
    stream.dump(str(temporary), encoding="utf-8")
    os.replace(temporary, path)


def drawing(graph: CheckpointGraph, chosen: list[str]) -> dict[str, Any]:
    """The `lineage_graph` of the checkpoints with these digests, parents first."""
    from xray_runtime.kernel.report.layout import lineage_graph

    stages = [
        {
            "name": stage_name(graph, sha),
            "checkpoint": {"sha256": sha},
            "parents": sorted({parent for _, parent in graph.parents(sha)}),
            "cached": False,
        }
        for sha in chosen
    ]
    return lineage_graph(stages)


def _siblings(graph: CheckpointGraph, chosen: list[str]) -> dict[str, str]:
    """Digest → the checkpoint of the same stage in the store that was made just before it."""
    by_stage = defaultdict[str, list[tuple[str, str]]](list)
    stages = {graph.nodes[sha].manifest.stage for sha in chosen if sha in graph.nodes}
    for node in graph.nodes.values():
        if node.manifest.stage in stages:
            by_stage[node.manifest.stage].append((node.finished, node.sha256))
    found: dict[str, str] = {}
    for made in by_stage.values():
        found |= {sha: before for (_, before), (_, sha) in itertools.pairwise(sorted(made))}
    return found


def _section(store: LineageStore, sha: str, sibling: str | None, shown: set[str]) -> dict[str, Any]:
    graph = store.graph
    node = graph.nodes.get(sha)
    if node is None:
        return {"sha": sha, "name": "missing", "missing": True}
    known = entry(graph, sha)
    other = graph.nodes.get(sibling) if sibling else None
    children = [(role, child) for role, child in graph.children.get(sha, []) if child in shown]
    return known | {
        "sha": sha,
        "name": node.manifest.stage,
        "made_from": [(role, parent, stage_name(graph, parent)) for role, parent in graph.parents(sha)],
        "used_by": [(role, child, stage_name(graph, child)) for role, child in children],
        "link": _link(store, node),
        "sibling": other.name if other else None,
        "differences": _differences(other, node) if other else [],
        "config": [] if other else [(k, v[:MAX_VALUE_CHARS]) for k, v in flatten(node.manifest.config).items()],
        "numbers": list(_numbers(node.results)),
        **_records(store, node),
        "samples": _samples(node),
    }


def _numbers(results: Mapping[str, Any], of: str = "", depth: int = 2) -> Iterator[tuple[str, str]]:
    """(name, value) of a stage's results, also of each judge; an interval is two numbers."""
    for name, value in sorted(results.items()):
        if isinstance(value, Mapping) and depth:
            yield from _numbers(value, f"{of}{name}: ", depth - 1)
        elif isinstance(value, int | float | str):
            yield f"{of}{name}", _cell(value)
        elif isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value):
            yield f"{of}{name}", " to ".join(map(_cell, value))


def _link(store: LineageStore, node: Node) -> str:
    """Link to the checkpoint's files, relative in a bundle."""
    home = store.output / CHECKPOINTS
    if node.directory.parent.absolute() == home.absolute():
        return node.directory.absolute().as_uri()
    return f"{CHECKPOINTS}/{node.directory.name}"


def _records(store: LineageStore, node: Node) -> dict[str, Any]:
    """Curves and findings, if the stage's records still exist."""
    directory = records_directory(store.output, node.manifest.stage, node.manifest.key)
    figure = (directory / METRICS).with_suffix(CURVES)
    series = read_metrics(directory / METRICS)
    findings = node.kind.findings(series) if node.kind is not None else []
    # As images, in which no script runs.
    panels = panels_of(figure.read_text(encoding="utf-8", errors="replace")) if figure.is_file() else []
    drawn = [base64.b64encode(panel.encode()).decode() for panel in panels]
    return {"figures": drawn, "findings": findings, "watched": monitored(series)}


def _samples(node: Node) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of an evaluation's sample conversations."""
    if not node.sides:
        return [], []
    try:
        content = json.loads(read_bounded(node.directory / "samples.json"))
        rows = [sample for sample in content if isinstance(sample, dict)][:MAX_SAMPLES]
    except (OSError, ValueError, TypeError, RecursionError):
        return [], []
    columns = list(rows[0]) if rows else []
    return columns, [[_cell(row.get(column)) for column in columns] for row in rows]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _differences(before: Node, after: Node) -> list[tuple[str, str, str]]:
    """(field, before, after) of config, parents, code and seed."""

    def facts(node: Node) -> dict[str, str]:
        manifest = node.manifest
        parents = {f"parent {role}": sha[:12] for role, sha in manifest.parents.items()}
        return flatten(manifest.config) | parents | {"code": manifest.code_digest[:12], "seed": str(manifest.seed)}

    differing = changed(facts(before), facts(after)).items()
    return [(name, (a or "")[:MAX_VALUE_CHARS], (b or "")[:MAX_VALUE_CHARS]) for name, (a, b) in differing]
