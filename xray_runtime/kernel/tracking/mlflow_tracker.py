"""MLflow behind one adapter: runs, metrics, tables, checkpoints as LoggedModels, datasets, the registry.

A lifecycle is a parent run with one child run for each stage. A checkpoint is a LoggedModel whose *params* hold its
identity (params cannot be changed later; tags can). It is an output of the run that made it and an input of every run
that used it, so MLflow's own pages show the lineage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xray_runtime.kernel.credentials import TRACKING, strip_credentials
from xray_runtime.kernel.store.checkpoints import statement_sha256
from xray_runtime.kernel.store.manifest import MANIFEST, Manifest
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.tracking.registry import TRAINING, ModelRegistry, open_client

ARTIFACTS = "mlartifacts"
"""Directory of the artifacts of an output directory's own MLflow, by run."""
MAX_PARAM_CHARS = 6000
MAX_BATCH = 900
"""Metrics in one request (MLflow allows 1,000)."""

PARENT_TAG = "mlflow.parentRunId"
KEY_TAG = "xray.key"
STAGE_TAG, CACHED_TAG, ATTEMPTS_TAG = "xray.stage", "xray.cached", "xray.attempts"
TABLES_TAG = "mlflow.loggedArtifacts"
"""Lists the artifacts of a run that MLflow's pages show as tables."""


def _set_process_store(uri: str) -> None:
    """Set MLflow's store of this process: registering a model resolves its source there, whatever the client's is."""
    import mlflow

    named = os.environ.get(TRACKING)
    mlflow.set_tracking_uri(uri)
    # MLflow sets the variable too: the next run of this process, with another output directory, would take it for the
    # user's choice.
    if named is None:
        os.environ.pop(TRACKING, None)
    else:
        os.environ[TRACKING] = named


def _succeeds(call: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    """Whether MLflow does what is asked; it raises where it does not know the run or model."""
    from mlflow.exceptions import MlflowException

    try:
        call(*arguments, **named)
    except MlflowException:
        return False
    return True


class Tracker:
    """One experiment of one MLflow store.

    Args:
        uri: tracking URI; `sqlite:///…` or a server's address.
        experiment: its name; created if it does not exist.
        artifact_root: directory of a new experiment's artifacts; None leaves that to the server.
    """

    def __init__(self, uri: str, experiment: str, artifact_root: Path | None) -> None:
        self.client = open_client(uri)
        _set_process_store(uri)
        if self.client.get_experiment_by_name(experiment) is None:
            location = artifact_root.absolute().as_uri() if artifact_root is not None else None
            # Another process may make it in the meantime.
            _succeeds(self.client.create_experiment, experiment, artifact_location=location)
        self.experiment_id: str = self.client.get_experiment_by_name(experiment).experiment_id
        self.registry = ModelRegistry(self.client)
        self.experiment = experiment
        # Prefect's pages show it.
        self._shown = strip_credentials(uri).rstrip("/") if uri.startswith("http") else None

    def start_lifecycle(
        self, run_id: str | None, name: str, config: Mapping[str, Any], config_yaml: str, tags: dict[str, str]
    ) -> str:
        """A parent run with the resolved config as params and as an artifact; returns its id.

        Args:
            run_id: the run of an interrupted lifecycle, which is resumed if this store knows it.
        """
        if run_id is not None and _succeeds(self.client.update_run, run_id, status="RUNNING"):
            self.tag(run_id, tags)
            return run_id
        run = self.client.create_run(self.experiment_id, run_name=name, tags=tags)
        self._params(run.info.run_id, params_of(config))
        self.client.log_text(run.info.run_id, config_yaml, "config.yaml")
        made: str = run.info.run_id
        return made

    def finish(self, run_id: str, status: str) -> None:
        """`status`: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run_id, status)

    def log_files(self, run_id: str, *paths: Path) -> None:
        for path in paths:
            self.client.log_artifact(run_id, str(path))

    def log_datasets(self, run_id: str) -> None:
        """Show the datasets of a lifecycle's stages in its own run too."""
        from mlflow.entities import DatasetInput

        stages = self.client.search_runs([self.experiment_id], filter_string=f"tags.`{PARENT_TAG}` = '{run_id}'")
        inputs = [entry for run in stages for entry in (run.inputs.dataset_inputs if run.inputs else [])]
        datasets = {entry.dataset.digest: DatasetInput(entry.dataset, entry.tags) for entry in inputs}
        if datasets:
            self.client.log_inputs(run_id, datasets=list(datasets.values()))

    def stage_run(
        self,
        parent_run_id: str,
        stage: str,
        key: str,
        config: Mapping[str, Any],
        more_tags: Mapping[str, str] | None = None,
    ) -> StageRun:
        """The child run of `stage`: the same one for every attempt at the same key."""
        query = f"tags.`{PARENT_TAG}` = '{parent_run_id}' and tags.`{KEY_TAG}` = '{key}'"
        runs = self.client.search_runs([self.experiment_id], filter_string=query, max_results=1)
        if runs:
            run = runs[0]
            self.client.update_run(run.info.run_id, status="RUNNING")
            self.tag(run.info.run_id, more_tags or {})
        else:
            tags = {PARENT_TAG: parent_run_id, KEY_TAG: key, STAGE_TAG: stage, **(more_tags or {})}
            run = self.client.create_run(self.experiment_id, run_name=stage, tags=tags)
            self._params(run.info.run_id, params_of(config) | {"key": key})
        return StageRun(self, run.info.run_id)

    def address(self, run_id: str) -> str:
        """Address of the run's page; without a server, the part after the address of `mlflow ui`."""
        page = f"#/experiments/{self.experiment_id}/runs/{run_id}{TRAINING}"
        return f"{self._shown}/{page}" if self._shown else page

    def page(self, run_id: str) -> str | None:
        """Address of the run's page; None without a server."""
        return self.address(run_id) if self._shown else None

    def image(self, run_id: str, name: str) -> str | None:
        """Address of a picture of the run; None without a server."""
        return f"{self._shown}/get-artifact?path={name}&run_uuid={run_id}" if self._shown else None

    def has_model(self, model_id: str) -> bool:
        """Whether this store knows the LoggedModel."""
        return _succeeds(self.client.get_logged_model, model_id)

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of a run."""
        for name, value in tags.items():
            self.client.set_tag(run_id, name, value)

    def _params(self, run_id: str, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        entries = [Param(k, v) for k, v in params.items()]
        for start in range(0, len(entries), 100):
            self.client.log_batch(run_id, params=entries[start : start + 100])


class StageRun:
    """The MLflow run of one stage."""

    def __init__(self, tracker: Tracker, run_id: str) -> None:
        self._tracker, self.run_id = tracker, run_id

    def metrics(self, points: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Log (step, time in ms, values) points. MLflow keeps one of equal points: sending again is harmless."""
        from mlflow.entities import Metric

        metrics = [Metric(name, value, ms, step) for step, ms, values in points for name, value in values.items()]
        for start in range(0, len(metrics), MAX_BATCH):
            self._tracker.client.log_batch(self.run_id, metrics=metrics[start : start + MAX_BATCH])

    def points(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log points as a file of metrics has them (`recorder.read_points`)."""
        self.metrics([(line["step"], line["time_ms"], line["metrics"]) for line in lines])

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        # In the form of MLflow's `log_table`, which would add to the rows of an attempt before.
        client, entry = self._tracker.client, {"path": f"{name}.json", "type": "table"}
        client.log_text(self.run_id, table_text(columns, rows), entry["path"])
        tables = json.loads(client.get_run(self.run_id).data.tags.get(TABLES_TAG, "[]"))
        if entry not in tables:
            client.set_tag(self.run_id, TABLES_TAG, json.dumps([*tables, entry]))

    def picture(self, path: Path) -> None:
        self._tracker.client.log_artifact(self.run_id, str(path))

    def log_checkpoint(self, ref: CheckpointRef, manifest: Manifest, parents: list[CheckpointRef]) -> CheckpointRef:
        """Make `ref` a LoggedModel and link it to its parents; returns `ref` with its `mlflow_model_id`."""
        client = self._tracker.client
        made = client.search_logged_models([self._tracker.experiment_id], f"source_run_id = '{self.run_id}'")
        # An earlier attempt may have logged it.
        model = next((m for m in made if m.params.get("sha256") == ref.sha256), None)
        if model is None:
            model = client.create_logged_model(
                self._tracker.experiment_id,
                name=f"{self._tracker.experiment}-{ref.stage}",
                source_run_id=self.run_id,
                params=model_params(manifest, ref.sha256, ref.path) | {"uri": ref.uri},
                model_type=ref.kind,
            )
        client.finalize_logged_model(model.model_id, "READY")
        ref = ref.model_copy(update={"mlflow_model_id": model.model_id})
        client.log_artifact(self.run_id, str(ref.path / MANIFEST))
        self.link(ref, manifest, parents)
        return ref

    def link(self, ref: CheckpointRef, manifest: Manifest, parents: list[CheckpointRef]) -> None:
        """Parents (and the dataset among them) as inputs of this run, `ref` as its output."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput, LoggedModelOutput

        client = self._tracker.client
        inputs = {p.mlflow_model_id: None for p in parents if p.mlflow_model_id}
        datasets = [
            DatasetInput(
                # A digest holds at most 36 characters; the tag holds the whole one.
                Dataset(p.stage, p.sha256[:36], "local", json.dumps({"uri": p.uri})),
                [InputTag("xray.sha256", p.sha256), InputTag("mlflow.data.context", ref.stage)],
            )
            for p in parents
            if p.sha256 == manifest.dataset
        ]
        client.log_inputs(self.run_id, models=[LoggedModelInput(model_id) for model_id in inputs], datasets=datasets)
        # MLflow refuses an output it has; another attempt of the same stage may have linked it.
        known = {output.model_id for output in client.get_run(self.run_id).outputs.model_outputs}
        if ref.mlflow_model_id and ref.mlflow_model_id not in known:
            client.log_outputs(self.run_id, [LoggedModelOutput(ref.mlflow_model_id, ref.step)])

    def link_cached(self, ref: CheckpointRef, manifest: Manifest, parents: list[CheckpointRef]) -> None:
        """Show an existing model with its parents in this run, which computed nothing."""
        self._tracker.client.set_tag(self.run_id, CACHED_TAG, "true")
        self.link(ref, manifest, parents)

    def finish(self, status: str, attempts: int = 0) -> None:
        """End the run as `status` after so many attempts (0: nothing was computed)."""
        self._tracker.client.set_tag(self.run_id, ATTEMPTS_TAG, str(attempts))
        self._tracker.client.set_terminated(self.run_id, status)


def table_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as MLflow's pages read it."""
    return json.dumps({"columns": columns, "data": rows}, ensure_ascii=False)


def abandon_run(uri: str, run_id: str, tags: Mapping[str, str]) -> None:
    """Mark a run whose process was lost, and its running stages, as FAILED; `tags`: further tags of the run."""
    client = open_client(uri)
    query = f"tags.`{PARENT_TAG}` = '{run_id}' and attributes.status = 'RUNNING'"
    stages = client.search_runs([client.get_run(run_id).info.experiment_id], filter_string=query)
    for name, value in tags.items():
        client.set_tag(run_id, name, value)
    for lost in (*(run.info.run_id for run in stages), run_id):
        client.set_terminated(lost, "FAILED")


def model_params(manifest: Manifest, sha256: str, directory: Path) -> dict[str, str]:
    """The params of a LoggedModel that name its checkpoint."""
    return {
        "sha256": sha256,
        "key": manifest.key,
        "config_digest": manifest.config_digest,
        "code_digest": manifest.code_digest,
        "seed": str(manifest.seed),
        "dataset_sha256": manifest.dataset or "",
        "statement_sha256": statement_sha256(directory) or "",
    } | {f"parent.{role}": sha256 for role, sha256 in manifest.parents.items()}


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The params of a run with this config."""
    return {name: value[:MAX_PARAM_CHARS] for name, value in flatten(config).items()}


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested config → dotted names and strings, list items by index."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, list):
            item = {str(i): x for i, x in enumerate(item)}
        if isinstance(item, Mapping) and item:
            flat |= flatten(item, f"{name}.")
        else:
            flat[name] = str(item)
    return flat
