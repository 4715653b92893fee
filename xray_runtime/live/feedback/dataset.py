"""Publish a checkpoint that no run computes: signed, in the log and in MLflow, like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import digests
from xray_runtime.kernel.evidence.statement import RunFacts, read_statement
from xray_runtime.kernel.graph.artifacts import Artifact, dataset_of
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.checkpoints import load_manifest
from xray_runtime.kernel.store.identity import Identity
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.tracking.mlflow_tracker import ARTIFACTS, Tracker
from xray_runtime.kernel.tracking.registry_view import RegistryView


def require_tracking(lineage: LineageStore) -> str:
    """MLflow's address. Raises ConfigError if none is known."""
    if lineage.tracking_uri is None:
        raise ConfigError(f"--tracking-uri: is required: there is no mlflow.db in {str(lineage.output)!r}")
    return lineage.tracking_uri


def publish_dataset(
    lineage: LineageStore,
    project: str,
    by: str,
    kind: str,
    type: type[Artifact],
    config: dict[str, Any],
    parents: Mapping[str, Node],
    write: Callable[[Path], None],
) -> tuple[CheckpointRef, bool]:
    """(the checkpoint, whether it is new); one that was cut short is finished.

    Args:
        project: MLflow's experiment.
        by: name of the person, on record.
        kind: stage and kind of the checkpoint.
        config: determines, together with the parents, every byte that `write` puts into the directory it is given,
            whatever the code.
        parents: role → checkpoint.

    Raises:
        ConfigError: no MLflow is known.
    """
    uri, store = require_tracking(lineage), evidence().open_store(lineage.output)
    sha256s = {role: node.sha256 for role, node in parents.items()}
    identity = Identity(stage=kind, kind=kind, config=config, seed=0, parents=sha256s, code={}, versions={})
    ref, mlflow = store.find(kind, identity.key), RegistryView(uri)
    if ref is not None and mlflow.model_of(ref.sha256) is not None:
        return ref, False
    refs = {role: node.reference(mlflow.model_of(node.sha256)) for role, node in parents.items()}
    tracker = Tracker(uri, project, lineage.artifacts)
    # If an earlier attempt was cut short after publishing, its statement names its runs.
    facts = read_statement(ref.path).predicate.details.run if ref is not None else RunFacts()
    tags = {"xray.output": str(lineage.output.absolute())}
    parent_run = tracker.start_lifecycle(facts.mlflow_parent_run_id, kind, {}, "", tags)
    run = tracker.stage_run(parent_run, kind, identity.key, config)
    if ref is None:
        facts = RunFacts(
            trigger={"kind": "command", "by": by}, mlflow_run_id=run.run_id, mlflow_parent_run_id=parent_run
        )
        record = evidence().attest(lineage.output, parents=refs, run=facts, started=datetime.now(UTC))
        with store.building(kind, identity.key) as built:
            write(built)
            dataset = dataset_of(refs.values())
            ref = store.publish(built, identity, type=type.__name__, step=0, dataset=dataset, attest=record)
    checkpoint = {ref.path.name: ref.sha256}
    evidence().log_checkpoints(lineage.output, checkpoint, here=True)
    ref = run.log_checkpoint(ref, load_manifest(ref.path), list(refs.values()))
    files = digests(lineage.output, [lineage.output / ARTIFACTS / run.run_id])
    evidence().log_checkpoints(lineage.output, checkpoint, files, here=True, renew=True)
    run.finish("FINISHED", 1)
    tracker.finish(parent_run, "FINISHED")
    return ref, True
