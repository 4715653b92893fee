"""A CycloneDX 1.7 bill of materials of a model: what it was trained from, with digests, licences and results.

https://cyclonedx.org/docs/1.7/json/. It says what the signed statements say; what no record knows is left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from xray_runtime.kernel.evidence.statement import OutsideSource, read_statement
from xray_runtime.kernel.graph.artifacts import Evaluation, Model, RewardModel, is_a
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.trust.card import RESULTS

MODEL, DATA = "machine-learning-model", "data"


def bill_of_materials(graph: CheckpointGraph, node: Node, chosen: Sequence[str]) -> dict[str, Any]:
    """The bill of materials of `node`; `chosen`: digests of all that it came from and was judged by, itself included.

    Raises OSError, ValueError: a statement cannot be read.
    """
    parts = [
        one
        for one in map(graph.nodes.__getitem__, chosen)
        if not is_a(one.manifest.type, Evaluation) and one.sha256 != node.sha256
    ]
    statement = read_statement(node.directory)
    internal = statement.predicate.build.internal
    packages = internal.environment.get("packages", {})
    sources = [_outside(source) for source in internal.sources]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "version": 1,
        "metadata": {
            "timestamp": statement.predicate.details.metadata.finished,
            "component": _component(graph, node),
        },
        "components": [
            *(_component(graph, part) for part in parts),
            *sources,
            *(_library(name, version) for name, version in sorted(packages.items())),
        ],
        "dependencies": [
            {"ref": one.sha256, "dependsOn": sorted(set(one.manifest.parents.values()) & set(chosen))}
            for one in [node, *parts]
        ],
    }


def to_json(bill: dict[str, Any]) -> bytes:
    return json.dumps(bill, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _component(graph: CheckpointGraph, node: Node) -> dict[str, Any]:
    """A checkpoint."""
    manifest, is_model = node.manifest, is_a(node.manifest.type, Model, RewardModel)
    found: dict[str, Any] = {
        "type": MODEL if is_model else DATA,
        "bom-ref": node.sha256,
        "name": manifest.stage,
        "version": node.sha256[:12],
        "hashes": [{"alg": "SHA-256", "content": node.sha256}],
        "properties": [
            {"name": "xray:kind", "value": manifest.kind},
            {"name": "xray:seed", "value": str(manifest.seed)},
            {"name": "xray:config_digest", "value": manifest.config_digest},
        ],
    }
    if not is_model:
        return found | {"data": [{"type": "dataset", "name": manifest.stage}]}
    parents = [graph.nodes[sha] for sha in sorted(set(manifest.parents.values())) if sha in graph.nodes]
    models = [parent for parent in parents if is_a(parent.manifest.type, Model, RewardModel)]
    if models:
        ancestors = [{"type": MODEL, "name": one.manifest.stage, "version": one.sha256[:12]} for one in models]
        found["pedigree"] = {"ancestors": ancestors}
    datasets = [{"ref": one.sha256} for one in parents if one not in models]
    card: dict[str, Any] = {"modelParameters": {"datasets": datasets} if datasets else {}}
    if is_a(manifest.type, Model):
        card["modelParameters"]["task"] = "text-generation"
    if metrics := _metrics(graph, node):
        card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    return found | {"modelCard": card}


def _metrics(graph: CheckpointGraph, node: Node) -> list[dict[str, str]]:
    """The results of its evaluations."""
    found = []
    for evaluation in graph.judgements_of(node.sha256, Evaluation):
        kind = find_kind(evaluation.manifest.kind)
        if kind is not None and kind.results:
            with contextlib.suppress(OSError, ValueError):
                results = json.loads((evaluation.directory / kind.results).read_text())
                found += [
                    {"type": name, "value": f"{results[name]:.6g}", "slice": evaluation.manifest.stage}
                    for name in RESULTS
                    if results.get(name) is not None
                ]
    return found


def _library(name: str, version: str) -> dict[str, Any]:
    address = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "name": name, "version": version, "purl": address, "bom-ref": address}


def _outside(source: OutsideSource) -> dict[str, Any]:
    """Something that was read from outside, with its declared licence."""
    terms = source.terms
    found: dict[str, Any] = {
        "type": MODEL if source.is_model else DATA,
        "bom-ref": f"{source.field}:{source.digest}",
        "name": source.name,
        "version": source.digest,
    }
    if source.kind in ("file", "directory"):
        found["hashes"] = [{"alg": "SHA-256", "content": source.digest}]
    if terms.license:
        found["licenses"] = [{"license": {"name": terms.license}}]
    declared = {"origin": terms.origin, "personal_data": terms.personal_data}
    if properties := [{"name": f"xray:{name}", "value": text} for name, text in declared.items() if text]:
        found["properties"] = properties
    return found
