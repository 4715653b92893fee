"""The manifest: what a checkpoint consists of and what it came from. Its sha256 is the checkpoint's."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

MANIFEST = "manifest.json"

CARD, ATTESTATION, SIGNATURE = "README.md", "attestation", "attestation.sig"
"""What may lie beside the files of a checkpoint without being part of it: how this copy came to be (see `lineage`)."""


class FileEntry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Relative, with forward slashes."""
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]
    """Bytes."""


class Manifest(BaseModel):
    """Everything here follows from the inputs alone: no time, no host, no path, no run id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    stage: str
    kind: str
    key: Sha256
    step: int
    seed: int
    parents: dict[str, Sha256]
    """Role → sha256 of the checkpoint that played it."""
    dataset: Sha256 | None
    sections: dict[str, Any]
    """The config sections the stage read."""
    config_digest: Sha256
    code_digest: Sha256
    versions: dict[str, str]
    files: list[FileEntry]
    """Sorted by path."""

    def to_bytes(self) -> bytes:
        """The one text of this manifest."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode()
