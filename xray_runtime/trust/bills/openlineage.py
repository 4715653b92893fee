"""OpenLineage events, one JSON a line: the START and COMPLETE of each stage, with its inputs and outputs.

https://openlineage.io/spec/2-0-2/OpenLineage.json. A catalogue (Marquez, DataHub, …) takes each line by POST.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from xray_runtime.kernel.evidence.statement import OutsideSource
from xray_runtime.kernel.history.graph import Node
from xray_runtime.trust.bills.history import PREFIX, History

EVENT = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
FACETS = "https://openlineage.io/spec/facets"
NAMESPACE = "xray"


def write(history: History) -> bytes:
    events = [event for node in history.nodes for event in _events(history, node)]
    return b"".join(json.dumps(event, sort_keys=True, ensure_ascii=False).encode() + b"\n" for event in events)


def _events(history: History, node: Node) -> Iterator[dict[str, Any]]:
    statement, manifest = history.statements[node.sha256], node.manifest
    times, internal = statement.predicate.details.metadata, statement.predicate.build.internal
    producer = f"{PREFIX}package:{internal.code.package_sha256}"
    outside = [_outside(source, producer) for source in history.graph.own_sources(node.sha256)]
    job_type = {"processingType": "BATCH", "integration": "XRAY", "jobType": manifest.kind.upper()}
    event = {
        "producer": producer,
        "schemaURL": EVENT,
        "run": {"runId": str(uuid5(NAMESPACE_URL, f"{PREFIX}{node.sha256}:{times.started}")), "facets": {}},
        "job": {
            "namespace": NAMESPACE,
            "name": manifest.stage,
            "facets": {"jobType": _facet("2-0-4/JobTypeJobFacet", producer, **job_type)},
        },
        "inputs": [*(_checkpoint(parent, producer) for parent in history.parents(node)), *outside],
        "outputs": [_checkpoint(node, producer)],
    }
    yield event | {"eventType": "START", "eventTime": times.started, "outputs": []}
    yield event | {"eventType": "COMPLETE", "eventTime": times.finished}


def _checkpoint(node: Node, producer: str) -> dict[str, Any]:
    return _dataset(NAMESPACE, node.manifest.stage, node.sha256, node.manifest.type.upper(), producer)


def _outside(source: OutsideSource, producer: str) -> dict[str, Any]:
    return _dataset(source.kind, source.name, source.digest, "MODEL" if source.is_model else "DATASET", producer)


def _dataset(namespace: str, name: str, version: str, kind: str, producer: str) -> dict[str, Any]:
    facets = {
        "version": _facet("1-0-1/DatasetVersionDatasetFacet", producer, datasetVersion=version),
        "datasetType": _facet("1-0-1/DatasetTypeDatasetFacet", producer, datasetType=kind),
    }
    return {"namespace": namespace, "name": name, "facets": facets}


def _facet(name: str, producer: str, **fields: str) -> dict[str, str]:
    version, _, title = name.partition("/")
    return {"_producer": producer, "_schemaURL": f"{FACETS}/{version}/{title}.json#/$defs/{title}"} | fields
