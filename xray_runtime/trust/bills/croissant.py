"""Croissant 1.0 metadata of the data behind a model: its files with digests, and the columns of their rows.

https://docs.mlcommons.org/croissant/docs/croissant-spec.html. One JSON-LD document for each dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xray_runtime.data.pairs import Example, PreferenceExample
from xray_runtime.kernel.graph.artifacts import Dataset, Preferences
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS
from xray_runtime.trust.bills.history import PREFIX, History, to_json

CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
"""As the specification has it."""
SUFFIX, ENCODING = ".arrow", "application/vnd.apache.arrow.file"


def write_all(history: History) -> dict[str, bytes]:
    """Name of a file → its content, for each dataset."""
    datasets = [one for one in history.parts if one.is_a(Dataset, Preferences)]
    return {f"{one.directory.name}.json": to_json(_metadata(history, one)) for one in datasets}


def _metadata(history: History, node: Node) -> dict[str, Any]:
    columns = (Example if node.is_a(Dataset) else PreferenceExample)._fields
    files = [entry for entry in node.manifest.files if entry.path.endswith(SUFFIX)]
    sources = history.statements[node.sha256].predicate.build.internal.sources
    licences = sorted({source.terms.license for source in sources if source.terms.license and not source.is_model})
    origins = [f"{source.name} ({source.kind}, {source.digest})" for source in sources if not source.is_model]
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "@id": PREFIX + node.sha256,
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": node.manifest.stage,
        "version": f"{node.manifest.format}.0.0",
        "datePublished": node.finished,
        "description": f"Made by the stage kind {node.manifest.kind} from {', '.join(origins) or 'other checkpoints'}.",
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": entry.path,
                "name": entry.path,
                "contentUrl": f"../{CHECKPOINTS}/{node.directory.name}/{entry.path}",
                "contentSize": f"{entry.size} B",
                "encodingFormat": ENCODING,
                "sha256": entry.sha256,
            }
            for entry in files
        ],
        "recordSet": [_record_set(entry.path, columns) for entry in files],
    } | ({"license": licences} if licences else {})


def _record_set(path: str, columns: Sequence[str]) -> dict[str, Any]:
    name = path.removesuffix(SUFFIX)
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"{name}/{column}",
                "name": column,
                "dataType": "sc:Text",
                "source": {"fileObject": {"@id": path}, "extract": {"column": column}},
            }
            for column in columns
        ],
    }
