"""The manifest: what a checkpoint consists of and what it came from. Its sha256 is the checkpoint's."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.store.identity import Identity, code_digest, digest

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

MANIFEST = "manifest.json"

CARD, ATTESTATION, SIGNATURE = "README.md", "attestation", "attestation.sig"
STATEMENT = "statement.json"
"""In `ATTESTATION`."""
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

    # Else pydantic writes null for NaN, which then nobody refuses.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    format: int = 2
    stage: str
    kind: str
    type: str
    """Of the artifact: Model, Dataset, …"""
    key: Sha256
    step: int
    seed: int
    parents: dict[str, Sha256]
    """Role → sha256 of the checkpoint that played it."""
    dataset: Sha256 | None
    config: dict[str, Any]
    """What the stage read; see `identity.Identity`, of which the next three are parts too."""
    functions: dict[str, dict[str, Sha256]] = {}
    code: dict[str, Sha256]
    versions: dict[str, str]
    files: list[FileEntry]
    """Sorted by path."""

    @property
    def identity(self) -> Identity:
        """What its key digests."""
        return Identity(
            stage=self.stage,
            kind=self.kind,
            config=self.config,
            seed=self.seed,
            parents=self.parents,
            functions=self.functions,
            code=self.code,
            versions=self.versions,
        )

    @property
    def code_digest(self) -> str:
        """One digest over `code`."""
        return code_digest(self.code)

    @property
    def config_digest(self) -> str:
        """One digest over `config`."""
        return digest(self.config)

    def to_bytes(self) -> bytes:
        """The one text of this manifest."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode()
