"""MLflow's runs against the checkpoints and the log: params, tags, names, inputs, metrics, deletions."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xray_runtime.kernel.credentials import strip_credentials
from xray_runtime.kernel.evidence.log import LOG
from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.kernel.history.audit_check import Finding
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.identity import digest
from xray_runtime.kernel.tracking.mlflow_tracker import (
    ATTEMPTS_TAG,
    KEY_TAG,
    PARENT_TAG,
    STAGE_TAG,
    model_params,
    params_of,
)
from xray_runtime.kernel.tracking.recorder import ATTEMPTS, METRICS, RECORDS, read_points
from xray_runtime.kernel.tracking.registry import LOG_TAG, SHA256_TAG
from xray_runtime.kernel.tracking.registry_view import RegistryView, point
from xray_runtime.trust.audit.registry import check_orphans, check_pages, check_registry
from xray_runtime.trust.audit.tables import STAGE_TAGS, check_tables

STATUSES = {"completed": ("FINISHED",), "failed": ("FAILED",), "interrupted": ("KILLED",)}
"""How a run ended → the statuses MLflow may have."""


def check_tracking(
    store: LineageStore, view: LogView, nodes: list[Node], everything: bool, changed: list[Node]
) -> Iterator[Finding]:
    """The records of `changed` and the registry of `nodes` in MLflow; with `everything` also the runs of the log, and
    models that the store lacks."""
    checked_uri = store.tracking_uri and ("" if store.artifacts is not None else strip_credentials(store.tracking_uri))
    for address in sorted({run.tracking for run in view.runs.values()} - {checked_uri}):
        if address or (store.output / "mlflow.db").is_file():
            where = address or "mlflow.db"
            yield Finding("MLflow", "tracking-unchecked", f"runs are recorded in {where}, which was not asked")
        else:
            yield Finding("MLflow", "tracking-missing", "mlflow.db, where runs were recorded, is not there")
    if store.tracking_uri is None:
        return
    try:
        mlflow = RegistryView(store.tracking_uri)
        found: list[Finding] = []
        for node in changed:
            found += _check_node(mlflow, store, view, node)
        audited = {node.sha256 for node in nodes}
        found += check_registry(mlflow, store, view, audited, everything)
        found += check_pages(mlflow, store, audited)
        if everything:
            found += check_orphans(mlflow, store, view.pruned)
            found += _check_runs(mlflow, view, checked_uri)
        if store.artifacts is not None:
            found += _check_rows(store, view, None if everything else audited)
    # A damaged database raises errors of many kinds; each means that MLflow cannot be read.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        yield Finding("MLflow", "tracking-unreadable", f"{type(error).__name__}: {reason}")
        return
    yield from found


def _check_rows(store: LineageStore, view: LogView, only: set[str] | None) -> Iterator[Finding]:
    """Every row of the output directory's own database; `only`: about the registered models of these checkpoints."""
    names = {decision.name for decision in view.decisions if only is None or decision.checkpoint in only}
    for finding in check_tables(store.output / "mlflow.db", store.graph, view, store.output):
        name = re.sub(r"(@[^@]*|/[0-9]+)$", "", finding.subject)
        if only is None or name in names:
            yield finding


def _check_runs(mlflow: RegistryView, view: LogView, checked_uri: str | None) -> Iterator[Finding]:
    """The runs of whole lifecycles, and the marks of the log that MLflow keeps."""
    for run_id, run in mlflow.runs.items():
        reason = view.contradicts(run.data.tags.get(LOG_TAG, ""))
        if reason is not None:
            yield Finding(LOG, "log-shorter", f"{reason} (run {run_id[:12]} in MLflow)")
    for run_id, began in view.runs.items():
        run = mlflow.runs.get(run_id)
        if began.tracking != checked_uri:
            continue
        if run is None:
            yield Finding(f"run {run_id[:12]}", "mlflow-run-missing", f"lifecycle run {run_id}")
            continue
        experiment = mlflow.experiments.get(run.info.experiment_id)
        if run.info.lifecycle_stage != "active" or experiment is None or experiment.lifecycle_stage != "active":
            yield Finding(f"run {run_id[:12]}", "mlflow-run-deleted", f"lifecycle run {run_id}, or its experiment")
        differing = [tag for tag, value in began.tags.items() if run.data.tags.get(tag) != value]
        known = {*began.tags, LOG_TAG}
        differing += [tag for tag in run.data.tags if tag.startswith("xray.") and tag not in known]
        facts = {
            "params": (digest(dict(run.data.params)), began.params),
            "name": (run.info.run_name, began.name),
            "experiment": (experiment.name if experiment is not None else "", began.experiment),
        }
        differing += [name for name, (shown, logged) in facts.items() if shown != logged]
        ended = view.ended.get(run_id)
        # A run that is killed after its end was signed still runs according to MLflow.
        if ended is not None and run.info.status not in (*STATUSES.get(ended.status, ()), "RUNNING"):
            differing.append("status")
        if differing:
            yield Finding(f"run {run_id[:12]}", "mlflow-run-changed", f"lifecycle run: {', '.join(sorted(differing))}")
        stages = (child for child in mlflow.runs.values() if child.data.tags.get(PARENT_TAG) == run_id)
        of_stages = {dataset for child in stages for dataset in _datasets(child)}
        for short, whole in sorted(set(_datasets(run)) - of_stages):
            detail = f"lifecycle run: no stage of it used dataset {short[:12]} ({str(whole)[:12]})"
            yield Finding(f"run {run_id[:12]}", "mlflow-dataset-changed", detail)


def _check_node(mlflow: RegistryView, store: LineageStore, view: LogView, node: Node) -> Iterator[Finding]:
    models = mlflow.by_sha.get(node.sha256, [])
    expected = model_params(node.manifest, node.sha256, node.directory)
    facts = node.run
    if not models:
        yield Finding(node.name, "mlflow-model-missing", "no LoggedModel has this sha256")
        return

    def is_ours(model: Any) -> tuple[bool, bool]:
        same_statement = model.params.get("statement_sha256", "") == expected["statement_sha256"]
        return same_statement, model.source_run_id == facts.mlflow_run_id

    # A checkpoint that was computed again also has older records, with another statement or of another run.
    model = max(models, key=is_ours)
    differing = sorted(name for name, value in expected.items() if (model.params.get(name) or "") != value)
    if Path(model.params.get("uri", "")).name != node.directory.name:
        differing.append("uri")
    if differing:
        yield Finding(node.name, "mlflow-model-changed", f"params of {model.model_id}: {', '.join(differing)}")
    if model.model_type != node.manifest.kind or any(tag.startswith("xray.") for tag in model.tags):
        yield Finding(node.name, "mlflow-model-changed", f"kind or tags of {model.model_id}")
    run_id = model.source_run_id
    if facts.mlflow_run_id in mlflow.runs and facts.mlflow_run_id != run_id:
        yield Finding(node.name, "mlflow-model-changed", f"{model.model_id} names another source run")
        run_id = facts.mlflow_run_id
    run = mlflow.runs.get(run_id)
    if run is None:
        yield Finding(node.name, "mlflow-run-missing", f"run {run_id}")
        return
    if run.info.lifecycle_stage != "active":
        yield Finding(node.name, "mlflow-run-deleted", f"run {run_id}")
    parent = run.data.tags.get(PARENT_TAG)
    if parent in mlflow.runs and mlflow.runs[parent].info.lifecycle_stage != "active":
        yield Finding(node.name, "mlflow-run-deleted", f"lifecycle run {parent}")
    recorded = facts.mlflow_parent_run_id if facts.mlflow_run_id == run_id else parent
    if recorded is not None and recorded not in mlflow.runs:
        yield Finding(node.name, "mlflow-run-missing", f"lifecycle run {recorded}")
    yield from _check_run(run, node, recorded)
    yield from _check_inputs(mlflow, run, node)
    yield from _check_metrics(mlflow, store, view, run_id, node)


def _check_run(run: Any, node: Node, parent: str | None) -> Iterator[Finding]:
    manifest = node.manifest
    expected = params_of(manifest.config) | {"key": manifest.key}
    params = run.data.params
    differing = sorted(name for name in {*expected, *params} if params.get(name) != expected.get(name))
    if differing:
        yield Finding(node.name, "mlflow-run-changed", f"params of run {run.info.run_id}: {', '.join(differing[:8])}")
    tags = {KEY_TAG: manifest.key, STAGE_TAG: manifest.stage} | ({PARENT_TAG: parent} if parent else {})
    differing = [name for name, value in tags.items() if run.data.tags.get(name) != value]
    differing += [name for name in run.data.tags if name.startswith("xray.") and name not in STAGE_TAGS]
    attempts = run.data.tags.get(ATTEMPTS_TAG, "0")
    if len(attempts) > 6 or not attempts.isascii() or not attempts.isdigit() or int(attempts) > _attempts(node):
        differing.append(ATTEMPTS_TAG)
    if run.info.run_name != manifest.stage:
        differing.append("name")
    if differing:
        detail = f"name or tags of run {run.info.run_id}: {', '.join(sorted(differing))}"
        yield Finding(node.name, "mlflow-run-changed", detail)


def _attempts(node: Node) -> int:
    """The largest number of attempts that a run may record; a later run that found the stage records fewer."""
    begun = node.run.attempts
    with contextlib.suppress(OSError, ValueError):
        # A later attempt may have finished the records of the one that published.
        path = node.directory.parent.parent / RECORDS / node.directory.name / ATTEMPTS
        begun = max(begun, int(read_bounded(path)))
    return begun


def _check_metrics(
    mlflow: RegistryView, store: LineageStore, view: LogView, run_id: str, node: Node
) -> Iterator[Finding]:
    """Every point against the signed file of metrics, and the numbers of an evaluation against its results."""
    name = f"{RECORDS}/{node.directory.name}/{METRICS}"
    metrics = mlflow.runs[run_id].data.metrics
    differing = []
    for result, value in node.results.items() if node.sides else ():
        if isinstance(value, int | float):
            shown = metrics.get(f"{node.manifest.kind}/{result}")
            if shown is None or not math.isclose(shown, float(value), rel_tol=1e-9, abs_tol=1e-12):
                differing.append(f"{node.manifest.kind}/{result}")
    if name in view.files:
        try:
            recorded = {
                point(metric, at["step"], at["time_ms"], value)
                for at in read_points(store.output / name)
                for metric, value in at["metrics"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # The file was changed, which is another finding.
            return
        shown_points = mlflow.history(run_id, sorted({*metrics, *(found[0] for found in recorded)}))
        differing += {found[0] for found in recorded - shown_points}
        more = {found[0] for found in shown_points - recorded}
        # After an interrupted attempt, the next one records the same points at another time.
        once = node.run.attempts <= 1
        differing += more if once else ()
        if more and not once:
            yield Finding(node.name, "mlflow-metric-earlier", ", ".join(sorted(more)[:8]))
    if differing:
        yield Finding(node.name, "mlflow-metric-changed", ", ".join(sorted(set(differing))[:8]))


def _check_inputs(mlflow: RegistryView, run: Any, node: Node) -> Iterator[Finding]:
    parents = set(node.manifest.parents.values())
    shown = {model_id: mlflow.model_sha(model_id) for model_id in mlflow.model_inputs(run.info.run_id)}
    for model_id, sha in sorted(shown.items()):
        if sha is None:
            yield Finding(node.name, "mlflow-input-missing", f"input {model_id} was deleted, or has no sha256")
        elif sha not in parents:
            yield Finding(node.name, "mlflow-input-added", f"input {model_id} is {sha[:12]}, which is not a parent")
    for missing in sorted(parents - {sha for sha in shown.values() if sha}):
        yield Finding(node.name, "mlflow-input-missing", f"parent {missing[:12]} is not among the run's inputs")
    datasets = _datasets(run)
    wanted = node.manifest.dataset
    if wanted is not None and (wanted[:36], wanted) not in datasets:
        code = "mlflow-dataset-changed" if datasets else "mlflow-input-missing"
        yield Finding(node.name, code, f"dataset {wanted[:12]} is not among the run's inputs")
    for short, whole in datasets:
        if wanted is None or (short, whole) != (wanted[:36], wanted):
            yield Finding(node.name, "mlflow-dataset-changed", f"dataset {short[:12]} is not the one that was used")


def _datasets(run: Any) -> list[tuple[str, str]]:
    """(digest, sha256) of a run's datasets."""
    found = []
    for entry in run.inputs.dataset_inputs if run.inputs else []:
        tags = {tag.key: tag.value for tag in entry.tags}
        found.append((entry.dataset.digest, tags.get(SHA256_TAG, "")))
    return found
