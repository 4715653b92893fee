"""What MLflow says, and its registry against the checkpoints and the log: versions, their tags, aliases."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.graph.artifacts import Evaluation
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.audit.log import LogView
from xray_runtime.lineage.log import LOG
from xray_runtime.tracking.mlflow_tracker import KEY_TAG
from xray_runtime.tracking.registry import LOG_TAG, check_sqlite

if TYPE_CHECKING:
    from xray_runtime.lineage.reference import LineageStore

PAGE = 1000

Point = tuple[str, int, int, str]
"""Metric, step, time in ms, value."""


def point(name: str, step: int, time_ms: int, value: float) -> Point:
    """A point as one compares it: MLflow's databases hold no infinity, and NaN equals nothing."""
    largest = sys.float_info.max
    return name, step, time_ms, repr(min(max(value, -largest), largest) if not math.isnan(value) else value)


class RegistryView:
    """What an MLflow store says, read once and never written.

    Raises:
        OSError: a SQLite file that is not there.
        ValueError: a file that is none of SQLite's.
    """

    def __init__(self, uri: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        check_sqlite(uri)
        import mlflow
        from mlflow.entities import ViewType

        self._client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiments = _pages(lambda token: self._client.search_experiments(ViewType.ALL, PAGE, page_token=token))
        self.experiments = {e.experiment_id: e for e in experiments}
        ids = list(self.experiments)
        self.models = {
            m.model_id: m
            for m in _pages(
                lambda token: self._client.search_logged_models(experiment_ids=ids, max_results=PAGE, page_token=token)
            )
        }
        self.runs = {
            r.info.run_id: r
            for r in _pages(lambda token: self._client.search_runs(ids, "", ViewType.ALL, PAGE, page_token=token))
        }
        self.registered = _pages(lambda token: self._client.search_registered_models(None, PAGE, page_token=token))
        self.versions = {
            (v.name, str(v.version)): v
            for v in _pages(lambda token: self._client.search_model_versions(None, PAGE, page_token=token))
        }
        self.by_sha: dict[str, list[Any]] = defaultdict(list)
        for model in self.models.values():
            self.by_sha[model.params.get("sha256", "")].append(model)

    def model_inputs(self, run_id: str) -> set[str]:
        """Ids of the models a run read; searching for runs does not give them."""
        run = self._client.get_run(run_id)
        outputs = {o.model_id for o in (run.outputs.model_outputs if run.outputs else [])}
        # A metric logged with a run's own output also makes that an input of the run.
        return {i.model_id for i in (run.inputs.model_inputs if run.inputs else [])} - outputs

    def history(self, run_id: str, names: Iterable[str]) -> set[Point]:
        """Every point of these metrics of a run."""
        return {
            point(name, found.step, found.timestamp, found.value)
            for name in names
            for found in self._client.get_metric_history(run_id, name)
        }

    def model_of(self, sha256: str) -> str | None:
        """The LoggedModel that is a checkpoint; None where the store does not know it."""
        models = self.by_sha.get(sha256)
        return models[0].model_id if models else None

    def model_sha(self, model_id: str) -> str | None:
        """Which checkpoint a LoggedModel says it is."""
        model = self.models.get(model_id)
        return model.params.get("sha256") if model is not None else None


def _pages(page: Any) -> list[Any]:
    found: list[Any] = []
    token = None
    while True:
        answer = page(token)
        found += answer
        token = answer.token
        if not token:
            return found


def check_registry(
    snapshot: RegistryView, store: LineageStore, view: LogView, audited: set[str], everything: bool
) -> Iterator[Finding]:
    """Registered versions and aliases of `audited`; with `everything` every alias that was decided."""
    judged = {sha for sha in audited if store.graph.judgements_of(sha, Evaluation)}
    for (name, number), version in sorted(snapshot.versions.items()):
        said: str | None = version.tags.get("xray.sha256")
        label = f"{name}/{number}"
        pointed = snapshot.model_sha(version.source.removeprefix("models:/"))
        if said not in audited and pointed not in audited:
            continue
        if said is None or said != pointed:
            detail = f"it says {str(said)[:12]} and points to {str(pointed)[:12]}"
            yield Finding(label, "registry-changed", detail)
        elif Path(version.tags.get("xray.uri", "")).name != store.graph.nodes[said].directory.name:
            yield Finding(label, "registry-changed", "its tag xray.uri names another directory")
        elif said not in judged:
            yield Finding(label, "evaluation-missing", f"{said[:12]} has no evaluation in the store")
        yield from _check_version(snapshot, view, label, version)
    aliases = {(m.name, alias): str(number) for m in snapshot.registered for alias, number in m.aliases.items()}
    known = {(v.name, str(v.version)): v.tags.get("xray.sha256") for v in snapshot.versions.values()}
    for (name, alias), decision in sorted(view.decided.items()):
        if not everything and decision.checkpoint not in audited:
            continue
        label, target = f"{name}@{alias}", aliases.get((name, alias))
        if target is None:
            yield Finding(label, "alias-moved", f"it is gone; the last decision is version {decision.version}")
        elif target != decision.version:
            yield Finding(label, "alias-moved", f"to version {target}; the last decision is version {decision.version}")
        elif known.get((name, target)) != decision.checkpoint:
            yield Finding(label, "registry-changed", f"version {target} is not {decision.checkpoint[:12]} any more")
    # In a store that several directories share, another of them may have decided about what was brought from there.
    brought = {entry.checkpoint for entry in view.published.values() if entry.action == "bring"}
    for (name, alias), target in sorted(aliases.items()):
        version = snapshot.versions.get((name, target))
        pointed = snapshot.model_sha(version.source.removeprefix("models:/")) if version is not None else None
        here = {known.get((name, target)), pointed} & (audited - brought if store.artifacts is None else audited)
        if here and (name, alias) not in view.decided:
            yield Finding(f"{name}@{alias}", "alias-moved", f"no decision put it to version {target}")


def _check_version(snapshot: RegistryView, view: LogView, label: str, version: Any) -> Iterator[Finding]:
    """What `pages` does not look at: the run it names, and the log's head of when its page was written."""
    model, run = snapshot.models.get(version.source.removeprefix("models:/")), snapshot.runs.get(version.run_id)
    key = run.data.tags.get(KEY_TAG) if run is not None else None
    if model is not None and key != model.params.get("key"):
        yield Finding(label, "registry-changed", f"it names run {version.run_id}, which is not of its stage")
    reason = view.contradicts(version.tags.get(LOG_TAG, ""))
    if reason is not None:
        yield Finding(LOG, "log-shorter", f"{reason} ({label} in MLflow)")


def check_orphans(snapshot: RegistryView, store: LineageStore, removed: set[str]) -> Iterator[Finding]:
    """LoggedModels of this output directory whose checkpoint is gone, and nobody decided that."""
    names = {node.directory.name for node in store.graph.nodes.values()}
    # A store inside the output directory moves with it; in a shared one only the path tells whose a model is.
    own = store.artifacts is not None
    for sha, models in sorted(snapshot.by_sha.items()):
        for model in models:
            uri = Path(model.params.get("uri", ""))
            if sha in store.graph.nodes or sha in removed or not (own or uri.parent.parent == store.output.absolute()):
                continue
            if uri.name not in names:
                stage = uri.name.rpartition("-")[0]
                yield Finding(f"{stage} {sha[:12]}", "checkpoint-missing", f"MLflow's {model.model_id} names it")
