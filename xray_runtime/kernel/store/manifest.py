"""The manifest: what a checkpoint consists of and what it came from. Its sha256 is the checkpoint's."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.kernel.store.identity import Identity, IdentityFields, code_digest, digest, file_sha256
from xray_runtime.kernel.store.ref import CheckpointRef

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

MANIFEST = "manifest.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
"""Hugging Face's index of a checkpoint's files of weights; see `models.weight_files`."""
LEDGER = "ledger"
"""Folder of a checkpoint or snapshot with its ledger."""

CARD, ATTESTATION, SIGNATURE = "README.md", "attestation", "model.sig"
"""The record of how this copy was made, beside the files of a checkpoint and no part of it: see `trust.attestation`."""
STATEMENT = "statement.json"
"""In `ATTESTATION`."""


class FileEntry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    path: str
    """Relative, with forward slashes."""
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]
    """Bytes."""


class Manifest(IdentityFields):
    """Everything here follows from the inputs alone: there is no time, host, path or run id in it."""

    # Otherwise pydantic writes null for NaN, and no later check sees it.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    format: int = 2
    type: str
    """Type of the artifact: Model, Dataset, …"""
    key: Sha256
    step: int
    parents: dict[str, Sha256]
    dataset: Sha256 | None
    functions: dict[str, dict[str, Sha256]] = Field(default_factory=dict)
    code: dict[str, Sha256]
    files: list[FileEntry]
    """Sorted by path."""

    @property
    def identity(self) -> Identity:
        return Identity(**{name: getattr(self, name) for name in Identity.model_fields})

    def reference(self, directory: Path, sha256: str, mlflow_model_id: str | None = None) -> CheckpointRef:
        """The reference to the checkpoint in `directory`, whose digest is `sha256`."""
        return CheckpointRef(
            uri=str(directory),
            sha256=sha256,
            stage=self.stage,
            kind=self.kind,
            type=self.type,
            step=self.step,
            mlflow_model_id=mlflow_model_id,
        )

    @property
    def code_digest(self) -> str:
        return code_digest(self.code)

    @property
    def config_digest(self) -> str:
        return digest(self.config)

    def to_bytes(self) -> bytes:
        """The one text of this manifest."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode()


def is_record(path: str) -> bool:
    """Whether a file of a checkpoint is its manifest, or part of the record beside its files."""
    return path in (MANIFEST, CARD, SIGNATURE) or path.startswith(f"{ATTESTATION}/")


def file_entries(directory: Path, sha256: Callable[[Path], str] = file_sha256) -> list[FileEntry]:
    """Every file below a directory with its size and digest, sorted by path; several are read at a time."""
    paths = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda path: sha256(directory / path), paths)
    return [
        FileEntry(path=path, sha256=digest, size=(directory / path).stat().st_size)
        for path, digest in zip(paths, digests, strict=True)
    ]
