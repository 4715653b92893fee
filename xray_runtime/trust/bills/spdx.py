"""An SPDX 3.0.1 document of a model, with the AI and dataset profiles, as JSON-LD.

https://spdx.github.io/spdx-spec/v3.0.1/
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from xray_runtime.kernel.evidence.statement import OutsideSource
from xray_runtime.kernel.history.graph import Node
from xray_runtime.trust.bills.history import PREFIX, History, is_model, to_json

CONTEXT = "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
CREATION = "_:creation"
NO_ASSERTION = "noAssertion"
"""The value of a field that no record has."""


def write(history: History) -> bytes:
    node = history.node
    agent = _element("SoftwareAgent", f"{PREFIX}agent", name="X-ray")
    packages = [_package(history, one) for one in [node, *history.parts]]
    outside = {_source_id(source): _outside(source) for source in history.sources}
    licences = [one for source in history.sources for one in _licence(source)]
    relationships = [one for part in [node, *history.parts] for one in _relationships(history, part)]
    elements = [agent, *packages, *outside.values(), *licences, *relationships]
    document = _element(
        "SpdxDocument",
        f"{PREFIX}spdx:{node.sha256}",
        name=node.name,
        rootElement=[PREFIX + node.sha256],
        element=[one["spdxId"] for one in elements],
        profileConformance=["core", "software", "ai", "dataset", "simpleLicensing"],
    )
    creation = {
        "type": "CreationInfo",
        "@id": CREATION,
        "specVersion": "3.0.1",
        "created": _time(node.finished),
        "createdBy": [agent["spdxId"]],
    }
    return to_json({"@context": CONTEXT, "@graph": [creation, document, *elements]})


def _element(kind: str, spdx_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "spdxId": spdx_id, "creationInfo": CREATION} | fields


def _package(history: History, node: Node) -> dict[str, Any]:
    """A checkpoint."""
    manifest = node.manifest
    common = {
        "name": manifest.stage,
        "software_packageVersion": node.sha256[:12],
        "builtTime": _time(node.finished),
        "verifiedUsing": [_hash(node.sha256)],
    }
    if not is_model(node):
        return _dataset(PREFIX + node.sha256, **common)
    settings = {name: value for name, value in manifest.config.items() if isinstance(value, bool | int | float | str)}
    results = {name: f"{value:.6g}" for _, name, value in history.results(node)}
    fields = {"ai_hyperparameter": _entries(settings | {"seed": manifest.seed}), "ai_metric": _entries(results)}
    return _element(
        "ai_AIPackage",
        PREFIX + node.sha256,
        software_primaryPurpose="model",
        ai_typeOfModel=[manifest.type],
        ai_informationAboutTraining=manifest.kind,
        **{name: entries for name, entries in fields.items() if entries},
        **common,
    )


def _outside(source: OutsideSource) -> dict[str, Any]:
    """Something that was read from outside."""
    fields: dict[str, Any] = {"name": source.name, "software_packageVersion": source.digest}
    if source.terms.origin:
        fields["comment"] = source.terms.origin
    if source.kind in ("file", "directory"):
        fields["verifiedUsing"] = [_hash(source.digest)]
    if source.is_model:
        return _element("ai_AIPackage", _source_id(source), software_primaryPurpose="model", **fields)
    # A sentence about personal data does not say whether they are sensitive.
    personal = "no" if source.terms.personal_data == "none" else NO_ASSERTION
    return _dataset(_source_id(source), dataset_hasSensitivePersonalInformation=personal, **fields)


def _dataset(spdx_id: str, **fields: Any) -> dict[str, Any]:
    kind = {"software_primaryPurpose": "data", "dataset_datasetType": ["text"]}
    return _element("dataset_DatasetPackage", spdx_id, **kind, **fields)


def _relationships(history: History, node: Node) -> Iterator[dict[str, Any]]:
    parents, outside = history.parents(node), history.graph.own_sources(node.sha256)
    models = [PREFIX + one.sha256 for one in parents if is_model(one)]
    datasets = [PREFIX + one.sha256 for one in parents if not is_model(one)]
    models += [_source_id(source) for source in outside if source.is_model]
    datasets += [_source_id(source) for source in outside if not source.is_model]
    if is_model(node):
        tests = [parent for one in _evaluations(history, node) for parent in history.parents(one)]
        found = {"descendantOf": models, "trainedOn": datasets}
        found["testedOn"] = [PREFIX + parent.sha256 for parent in tests if not is_model(parent)]
    else:
        found = {"hasInput": models + datasets}
    for kind, ends in found.items():
        if ends:
            yield _relationship(kind, PREFIX + node.sha256, sorted(set(ends)))


def _evaluations(history: History, node: Node) -> list[Node]:
    return list({one.sha256: one for one, _, _ in history.results(node)}.values())


def _licence(source: OutsideSource) -> list[dict[str, Any]]:
    if not source.terms.license:
        return []
    text = _element(
        "simplelicensing_SimpleLicensingText",
        f"{_source_id(source)}:licence",
        simplelicensing_licenseText=source.terms.license,
    )
    return [text, _relationship("hasDeclaredLicense", _source_id(source), [text["spdxId"]])]


def _relationship(kind: str, start: str, ends: list[str]) -> dict[str, Any]:
    return _element("Relationship", f"{start}:{kind}", relationshipType=kind, **{"from": start, "to": ends})


def _source_id(source: OutsideSource) -> str:
    return f"{PREFIX}source:{source.field}:{source.digest}"


def _hash(sha256: str) -> dict[str, str]:
    return {"type": "Hash", "algorithm": "sha256", "hashValue": sha256}


def _entries(values: dict[str, Any]) -> list[dict[str, str]]:
    return [{"type": "DictionaryEntry", "key": key, "value": str(value)} for key, value in sorted(values.items())]


def _time(text: str) -> str:
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
