"""A CycloneDX 1.7 bill of materials of a model: what it was trained from, with digests, licences and results.

https://cyclonedx.org/docs/1.7/json/
"""

from __future__ import annotations

from typing import Any

from xray_runtime.kernel.evidence.statement import OutsideSource
from xray_runtime.kernel.graph.artifacts import Model
from xray_runtime.kernel.history.graph import Node
from xray_runtime.trust.bills.history import History, is_model, to_json

MODEL, DATA = "machine-learning-model", "data"


def write(history: History) -> bytes:
    node, parts = history.node, history.parts
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "version": 1,
        "metadata": {"timestamp": node.finished, "component": _component(history, node)},
        "components": [
            *(_component(history, part) for part in parts),
            *(_outside(source) for source in history.sources),
            *(_library(name, version) for name, version in sorted(history.environment.get("packages", {}).items())),
        ],
        "dependencies": [
            {"ref": one.sha256, "dependsOn": [parent.sha256 for parent in history.parents(one)]}
            for one in [node, *parts]
        ],
    }
    return to_json(bill)


def _component(history: History, node: Node) -> dict[str, Any]:
    """A checkpoint."""
    manifest = node.manifest
    found: dict[str, Any] = {
        "type": MODEL if is_model(node) else DATA,
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
    if not is_model(node):
        return found | {"data": [{"type": "dataset", "name": manifest.stage}]}
    parents = history.parents(node)
    models = [parent for parent in parents if is_model(parent)]
    if models:
        ancestors = [{"type": MODEL, "name": one.manifest.stage, "version": one.sha256[:12]} for one in models]
        found["pedigree"] = {"ancestors": ancestors}
    datasets = [{"ref": one.sha256} for one in parents if one not in models]
    card: dict[str, Any] = {"modelParameters": {"datasets": datasets} if datasets else {}}
    if node.is_a(Model):
        card["modelParameters"]["task"] = "text-generation"
    metrics = [
        {"type": name, "value": f"{value:.6g}", "slice": evaluation.manifest.stage}
        for evaluation, name, value in history.results(node)
    ]
    if metrics:
        card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    return found | {"modelCard": card}


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
