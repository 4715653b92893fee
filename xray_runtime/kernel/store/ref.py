"""A reference to a published checkpoint: stages pass references, never weights."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class CheckpointRef(BaseModel):
    """The place and the digest of a checkpoint."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    uri: str
    """Absolute directory."""
    sha256: str
    """Digest of its manifest.json, which lists every file with its own digest."""
    stage: str
    kind: str
    type: str
    """Type of the artifact: Model, Dataset, …"""
    step: int
    mlflow_model_id: str | None = None

    @property
    def path(self) -> Path:
        return Path(self.uri)
