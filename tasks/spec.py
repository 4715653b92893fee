"""Records that are sent to a stage's task and back. They are small and never contain weights."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, SecretStr

from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.sources import SourceTerms
from xray_runtime.kernel.credentials import FORWARDED
from xray_runtime.kernel.store.ref import CheckpointRef


class StageSpec(BaseModel):
    """One stage of a graph, without its parents, which may not exist yet."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    name: str
    kind: str
    module: str
    """Module that registers `kind`."""
    config: dict[str, Any]
    seed: int
    runtime: RuntimeConfig
    code: dict[str, str]
    """Module → digest of its code where the graph was built; a worker must have the same."""
    sources: dict[str, str] = {}
    """File → text of functions that were given as objects, since other processes cannot read a notebook's cells."""


class RunContext(BaseModel):
    """The part of a run that its tasks need."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    output: str
    """Absolute directory of checkpoints, records, logs."""
    tracking_uri: str
    experiment: str
    run_id: str
    """MLflow's parent run, also part of the names of the run's actors."""
    flow_run_id: str | None = None
    trigger: dict[str, str] = {}
    """Trigger of the flow, and the user."""
    gates: dict[str, Any] | None = None
    """Bounds for promoting a candidate of this run, for the signed record of its evaluation."""
    terms: dict[str, SourceTerms] = {}
    """Source, by its name in the config → terms of its use."""
    node: str | None = None
    """Ray's id of the only node that sees `output`, where stages must run. None: any node."""
    tags: dict[str, str] = {}
    """Tags that link a stage's MLflow run to the flow run."""
    variables: dict[str, SecretStr] = {}
    """The forwarded environment: variables of the driver that another machine may lack."""
    path: tuple[str, ...] = ()
    """Directories of the driver's Python path, for users' modules on the same machine."""


class StageResult(BaseModel):
    """The result of a stage for the flow; small, since Prefect stores it."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

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
    """0: the checkpoint came from the store."""

    @classmethod
    def existing(cls, ref: CheckpointRef) -> StageResult:
        """The result for a checkpoint that existed before the run."""
        fields: dict[str, Any] = {"dataset": None, "mlflow_run_id": "", "seconds": 0.0, "attempts": 0}
        return cls(name=ref.stage, kind=ref.kind, key="", checkpoint=ref, parents={}, **fields)

    @property
    def cached(self) -> bool:
        """Whether the checkpoint came from the store."""
        return self.attempts == 0


def forwarded_variables() -> dict[str, SecretStr]:
    """`variables` of a `RunContext`; they only travel inside Ray."""
    return {name: SecretStr(os.environ[name]) for name in FORWARDED if name in os.environ}
