"""The differences between the histories of two checkpoints, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xray_runtime.kernel.graph.artifacts import Evaluation
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.history.render import MAX_VALUE_CHARS, printable
from xray_runtime.kernel.tracking.mlflow_tracker import flatten

CAUSES = ("parents", "config", "functions", "code", "versions")
"""Parts of a stage key."""
ASPECTS = (*CAUSES[:2], "data", *CAUSES[2:], "environment", "results")


def diff(left: LineageStore, a: Node, right: LineageStore, b: Node) -> dict[str, Any]:
    """Stages of the same name compared; the two checkpoints themselves whatever their names.

    Returns {"a", "b", "same", "only_a", "only_b", "stages": [{"stage", "a", "b", aspect: {field: [a, b]}}]}, where
    `stages` holds those whose checkpoints differ, in order of making.
    """
    mine, theirs = _history(left.graph, a), _history(right.graph, b)
    if a.manifest.stage != b.manifest.stage:
        theirs = {(a.manifest.stage if node.sha256 == b.sha256 else name): node for name, node in theirs.items()}
    stages = []
    for name, node in mine.items():
        other = theirs.get(name)
        if other is not None and other.sha256 != node.sha256:
            facts = _facts(left.graph, node), _facts(right.graph, other)
            aspects = {aspect: changed(facts[0][aspect], facts[1][aspect]) for aspect in ASPECTS}
            stages.append({"stage": name, "a": node.sha256, "b": other.sha256} | aspects)
    return {
        "a": a.sha256,
        "b": b.sha256,
        "same": a.sha256 == b.sha256,
        "only_a": [name for name in mine if name not in theirs],
        "only_b": [name for name in theirs if name not in mine],
        "stages": stages,
    }


def diff_text(content: Mapping[str, Any]) -> Iterator[str]:
    """`diff` as text: causes first, then their consequences."""
    if content["same"]:
        yield "the same checkpoint"
        return
    yield f"a {content['a'][:12]}"
    yield f"b {content['b'][:12]}"
    for side in ("a", "b"):
        if content[f"only_{side}"]:
            yield f"only in {side}: {', '.join(map(printable, content[f'only_{side}']))}"
    for stage in content["stages"]:
        yield ""
        cause = any(stage[aspect] for aspect in CAUSES)
        yield f"{printable(stage['stage'])}  {stage['a'][:12]} → {stage['b'][:12]}" + (
            "" if cause else "  (same config, code and versions: it follows from what is above)"
        )
        for aspect in ASPECTS:
            for field, (before, after) in stage[aspect].items():
                yield f"  {aspect:12}{printable(field)}: {_show(before)} → {_show(after)}"


def _history(graph: CheckpointGraph, node: Node) -> dict[str, Node]:
    """Stage → checkpoint of `node`, its ancestors, and its evaluation if there is one."""
    found = {}
    judged = [evaluation.sha256 for evaluation in graph.judgements_of(node.sha256, Evaluation)][-1:]
    for sha in graph.ancestors([node.sha256, *judged]):
        if sha in graph.nodes:
            found[graph.nodes[sha].manifest.stage] = graph.nodes[sha]
    return found


def _facts(graph: CheckpointGraph, node: Node) -> dict[str, dict[str, Any]]:
    manifest, statement = node.manifest, node.statement
    stages = {
        role: graph.nodes[sha].manifest.stage if sha in graph.nodes else sha for role, sha in manifest.parents.items()
    }
    facts: dict[str, dict[str, Any]] = {
        "parents": stages,
        "config": flatten(manifest.config) | {"seed": str(manifest.seed)},
        "data": {"dataset": manifest.dataset},
        "functions": {f"{name} {module}": d for name, code in manifest.functions.items() for module, d in code.items()},
        "code": dict(manifest.code),
        "versions": dict(manifest.versions),
        "environment": {},
        "results": {k: v for k, v in node.results.items() if isinstance(v, int | float | str)},
    }
    if statement is not None:
        internal = statement.predicate.build.internal
        environment = internal.environment
        facts["environment"] = {k: environment.get(k) for k in ("python", "platform", "cpu", "gpus", "packages")}
        facts["environment"] |= {"commit": internal.code.git_commit, "uncommitted": internal.code.diff_sha256}
        packages = environment.get("packages")
        if isinstance(packages, dict):
            del facts["environment"]["packages"]
            facts["environment"] |= {f"package {name}": version for name, version in packages.items()}
        for dependency in statement.predicate.build.dependencies:
            if dependency.digest is not None and not (dependency.uri or "").startswith("xray:"):
                facts["data"][dependency.name] = dependency.digest.sha256
    return facts


def changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Name → [value in a, value in b] where they differ."""
    return {k: [a.get(k), b.get(k)] for k in sorted({*a, *b}) if a.get(k) != b.get(k)}


def _show(value: Any) -> str:
    text = "nothing" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    if len(text) == 64 and not set(text) - set("0123456789abcdef"):
        return text[:12]
    return printable(text[:MAX_VALUE_CHARS])
