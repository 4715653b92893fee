"""What travels to a stage's task and back: small records; weights never do."""

from __future__ import annotations

import os
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, SecretStr

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.sources import SourceTerms
from xray_runtime.credentials import FORWARDED
from xray_runtime.store.ref import CheckpointRef


class StageSpec(BaseModel):
    """One stage of a graph, but for its parents, which may not exist yet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: str
    module: str
    """The module that registers `kind`, where it is a user's own."""
    config: dict[str, Any]
    seed: int
    runtime: RuntimeConfig
    code: dict[str, str]
    """Module → digest of the code that the graph was written with: a worker must have the same."""
    sources: dict[str, str] = {}
    """File → text of functions that were handed over as objects: a notebook's cells are files of no other process."""


class RunContext(BaseModel):
    """Where a run keeps its things."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str
    """Absolute directory of checkpoints, records, logs."""
    tracking_uri: str
    experiment: str
    run_id: str
    """MLflow's parent run; the run's actors carry it in their names."""
    flow_run_id: str | None = None
    trigger: dict[str, str] = {}
    """What started the flow, and who: for the record."""
    gates: dict[str, Any] | None = None
    """What a candidate of this run must pass to be promoted: for the signed record of its evaluation."""
    terms: dict[str, SourceTerms] = {}
    """Source, by the name a config has for it → under what terms it may be used."""
    node: str | None = None
    """Ray's id of the only node that stages may run on: no other sees `output`. None: any."""
    tags: dict[str, str] = {}
    """By which a stage's MLflow run leads to the flow run."""
    variables: dict[str, SecretStr] = {}
    """Of the driver's environment, what a stage needs on a machine that may lack it; see `forwarded_variables`."""
    path: tuple[str, ...] = ()
    """Directories of the driver's Python path, for users' modules on the same machine."""


class StageResult(BaseModel):
    """What a finished stage tells the flow; small, since it travels through Prefect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: str
    key: str
    checkpoint: CheckpointRef
    parents: dict[str, str]
    """Role → checkpoint sha256."""
    dataset: str | None
    mlflow_run_id: str
    seconds: float
    attempts: int
    """0: nothing was computed."""

    @property
    def cached(self) -> bool:
        """Whether the checkpoint was there already."""
        return self.attempts == 0

    @classmethod
    def of_checkpoint(cls, ref: CheckpointRef) -> Self:
        """Of a checkpoint that existed before the run."""
        return cls(
            name=ref.stage,
            kind=ref.kind,
            key="",
            checkpoint=ref,
            parents={},
            dataset=None,
            mlflow_run_id="",
            seconds=0.0,
            attempts=0,
        )


def forwarded_variables() -> dict[str, SecretStr]:
    """`variables` of a `RunContext`. They travel inside Ray alone."""
    return {name: SecretStr(os.environ[name]) for name in FORWARDED if name in os.environ}
