"""MLflow against the checkpoints: params, tags, inputs, deleted runs, registered versions and aliases."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xray_runtime.lineage.attestation import statement_sha256
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.audit.pages import check_pages
from xray_runtime.lineage.decisions import current, pruned
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.reference import LineageStore
from xray_runtime.lineage.run_statement import run_on_record
from xray_runtime.stages.artifacts import Evaluation
from xray_runtime.tracking.mlflow_tracker import KEY_TAG, MAX_PARAM_CHARS, PARENT_TAG, flatten

PAGE = 1000


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
        _check_sqlite(uri)
        import mlflow
        from mlflow.entities import ViewType

        self._client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiments = _pages(lambda token: self._client.search_experiments(ViewType.ALL, PAGE, page_token=token))
        ids = [e.experiment_id for e in experiments]
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

    def model_of(self, sha256: str) -> str | None:
        """The LoggedModel that is a checkpoint; None where the store does not know it."""
        models = self.by_sha.get(sha256)
        return models[0].model_id if models else None

    def model_sha(self, model_id: str) -> str | None:
        """Which checkpoint a LoggedModel says it is."""
        model = self.models.get(model_id)
        return model.params.get("sha256") if model is not None else None


def _check_sqlite(uri: str) -> None:
    """MLflow would fill a file that is missing or empty with tables of its own."""
    if uri.startswith("sqlite:///"):
        with open(uri.removeprefix("sqlite:///"), "rb") as file:
            if file.read(16) != b"SQLite format 3\0":
                raise ValueError("not an SQLite database")


def _pages(page: Any) -> list[Any]:
    found: list[Any] = []
    token = None
    while True:
        answer = page(token)
        found += answer
        token = answer.token
        if not token:
            return found


def registered_checkpoint(uri: str, reference: str) -> tuple[str, Path] | None:
    """(sha256, directory) of `name@alias` or `name/version`; None when there is none."""
    from mlflow.exceptions import MlflowException

    with contextlib.suppress(MlflowException, OSError, ValueError):
        _check_sqlite(uri)
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        name, _, alias = reference.rpartition("@")
        if name:
            version = client.get_model_version_by_alias(name, alias)
        else:
            name, _, number = reference.rpartition("/")
            version = client.get_model_version(name, number)
        params = client.get_logged_model(version.source.removeprefix("models:/")).params
        if re.fullmatch(r"[0-9a-f]{64}", params.get("sha256", "")):
            return params["sha256"], Path(params.get("uri", ""))
    return None


def check_tracking(store: LineageStore, nodes: list[Node], everything: bool, changed: list[Node]) -> Iterator[Finding]:
    """The records of `changed` and the registry of `nodes` in MLflow; with `everything` also what it knows and the
    store does not."""
    assert store.tracking_uri is not None
    try:
        snapshot = RegistryView(store.tracking_uri)
        found: list[Finding] = []
        for node in changed:
            found += _check_node(snapshot, node)
        audited = {node.sha256 for node in nodes}
        found += _check_registry(snapshot, store, audited, everything)
        found += check_pages(snapshot, store, audited)
        if everything:
            found += _check_orphans(snapshot, store)
            found += _check_ended(snapshot, store)
    # A damaged database raises whatever its layers raise; each means that MLflow cannot be asked.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        yield Finding("MLflow", "tracking-unreadable", f"{type(error).__name__}: {reason}")
        return
    yield from found


def _check_node(snapshot: RegistryView, node: Node) -> Iterator[Finding]:
    models = snapshot.by_sha.get(node.sha256, [])
    digest = statement_sha256(node.directory)
    statement = node.statement
    facts = statement.predicate.details.run if statement is not None else None
    # A checkpoint that was computed again has other records too: with the statement of then, or of another run.
    models = sorted(
        models,
        key=lambda m: (
            m.params.get("statement_sha256") == digest,
            facts is not None and m.source_run_id == facts.mlflow_run_id,
        ),
    )
    if not models:
        yield Finding(node.name, "mlflow-model-missing", "no LoggedModel has this sha256")
        return
    model = models[-1]
    differing = sorted(
        name for name, value in _model_params(node, digest).items() if (model.params.get(name) or "") != value
    )
    if Path(model.params.get("uri", "")).name != node.directory.name:
        differing.append("uri")
    if differing:
        yield Finding(node.name, "mlflow-model-changed", f"params of {model.model_id}: {', '.join(differing)}")
    run_id = model.source_run_id
    if facts is not None and facts.mlflow_run_id in snapshot.runs and facts.mlflow_run_id != run_id:
        yield Finding(node.name, "mlflow-model-changed", f"{model.model_id} names another source run")
        run_id = facts.mlflow_run_id
    run = snapshot.runs.get(run_id)
    if run is None:
        yield Finding(node.name, "mlflow-run-missing", f"run {run_id}")
        return
    if run.info.lifecycle_stage != "active":
        yield Finding(node.name, "mlflow-run-deleted", f"run {run_id}")
    parent = run.data.tags.get(PARENT_TAG)
    if parent in snapshot.runs and snapshot.runs[parent].info.lifecycle_stage != "active":
        yield Finding(node.name, "mlflow-run-deleted", f"lifecycle run {parent}")
    recorded = facts.mlflow_parent_run_id if facts is not None and facts.mlflow_run_id == run_id else parent
    if recorded is not None and recorded not in snapshot.runs:
        yield Finding(node.name, "mlflow-run-missing", f"lifecycle run {recorded}")
    yield from _check_run(run, node, recorded)
    yield from _check_inputs(snapshot, run, node)


def _model_params(node: Node, digest: str | None) -> dict[str, str]:
    manifest = node.manifest
    return {
        "sha256": node.sha256,
        "key": manifest.key,
        "config_digest": manifest.config_digest,
        "code_digest": manifest.code_digest,
        "seed": str(manifest.seed),
        "dataset_sha256": manifest.dataset or "",
        "statement_sha256": digest or "",
    } | {f"parent.{role}": sha256 for role, sha256 in manifest.parents.items()}


def _check_run(run: Any, node: Node, parent: str | None) -> Iterator[Finding]:
    manifest = node.manifest
    expected = {k: v[:MAX_PARAM_CHARS] for k, v in (flatten(manifest.config) | {"key": manifest.key}).items()}
    params = run.data.params
    differing = sorted(name for name in {*expected, *params} if params.get(name) != expected.get(name))
    if differing:
        yield Finding(node.name, "mlflow-run-changed", f"params of run {run.info.run_id}: {', '.join(differing[:8])}")
    tags = {KEY_TAG: manifest.key, "xray.stage": manifest.stage} | ({PARENT_TAG: parent} if parent else {})
    differing = sorted(name for name, value in tags.items() if run.data.tags.get(name) != value)
    if differing:
        yield Finding(node.name, "mlflow-run-changed", f"tags of run {run.info.run_id}: {', '.join(differing)}")
    if node.kind is not None and node.kind.sides and run.data.tags.get("xray.cached") != "true":
        yield from _check_metrics(run.data.metrics, node)


def _check_metrics(metrics: Mapping[str, float], node: Node) -> Iterator[Finding]:
    differing = []
    for name, value in node.results.items():
        if not isinstance(value, int | float):
            continue
        shown = metrics.get(f"{node.manifest.kind}/{name}")
        if shown is None or not math.isclose(shown, float(value), rel_tol=1e-9, abs_tol=1e-12):
            differing.append(name)
    if differing:
        yield Finding(node.name, "mlflow-metric-changed", f"{node.manifest.kind}/: {', '.join(sorted(differing))}")


def _check_inputs(snapshot: RegistryView, run: Any, node: Node) -> Iterator[Finding]:
    parents = set(node.manifest.parents.values())
    shown = {model_id: snapshot.model_sha(model_id) for model_id in snapshot.model_inputs(run.info.run_id)}
    for model_id, sha in sorted(shown.items()):
        if sha is None:
            yield Finding(node.name, "mlflow-input-missing", f"input {model_id} was deleted, or has no sha256")
        elif sha not in parents:
            yield Finding(node.name, "mlflow-input-added", f"input {model_id} is {sha[:12]}, which is not a parent")
    for missing in sorted(parents - {sha for sha in shown.values() if sha}):
        yield Finding(node.name, "mlflow-input-missing", f"parent {missing[:12]} is not among the run's inputs")
    datasets = []
    for entry in run.inputs.dataset_inputs if run.inputs else []:
        tags = {tag.key: tag.value for tag in entry.tags}
        datasets.append((entry.dataset.digest, tags.get("xray.sha256")))
    wanted = node.manifest.dataset
    if wanted is not None and (wanted[:36], wanted) not in datasets:
        code = "mlflow-dataset-changed" if datasets else "mlflow-input-missing"
        yield Finding(node.name, code, f"dataset {wanted[:12]} is not among the run's inputs")
    for short, whole in datasets:
        if wanted is None or (short, whole) != (wanted[:36], wanted):
            yield Finding(node.name, "mlflow-dataset-changed", f"dataset {short[:12]} is not the one that was used")


def _check_registry(
    snapshot: RegistryView, store: LineageStore, audited: set[str], everything: bool
) -> Iterator[Finding]:
    decisions = current(store.output)
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
    aliases = {(m.name, alias): str(number) for m in snapshot.registered for alias, number in m.aliases.items()}
    known = {(v.name, str(v.version)): v.tags.get("xray.sha256") for v in snapshot.versions.values()}
    for (name, alias), decision in sorted(decisions.items()):
        if not everything and decision.checkpoint not in audited:
            continue
        label, target = f"{name}@{alias}", aliases.get((name, alias))
        if target is None:
            yield Finding(label, "alias-moved", f"it is gone; the last decision is version {decision.version}")
        elif target != decision.version:
            yield Finding(label, "alias-moved", f"to version {target}; the last decision is version {decision.version}")
        elif known.get((name, target)) != decision.checkpoint:
            yield Finding(label, "registry-changed", f"version {target} is not {decision.checkpoint[:12]} any more")
    for (name, alias), target in sorted(aliases.items()):
        here = known.get((name, target)) in audited
        if here and decisions and (name, alias) not in decisions:
            yield Finding(f"{name}@{alias}", "alias-moved", f"no decision points it to version {target}")


def _check_orphans(snapshot: RegistryView, store: LineageStore) -> Iterator[Finding]:
    """LoggedModels of this output directory whose checkpoint is gone."""
    removed = pruned(store.output)
    names = {node.directory.name for node in store.graph.nodes.values()}
    # A store inside the output directory moves with it; in a shared one only the path tells whose a model is.
    own = store.tracking_uri == f"sqlite:///{(store.output / 'mlflow.db').absolute()}"
    for sha, models in sorted(snapshot.by_sha.items()):
        for model in models:
            uri = Path(model.params.get("uri", ""))
            if sha in store.graph.nodes or sha in removed or not (own or uri.parent.parent == store.output.absolute()):
                continue
            if uri.name not in names:
                stage = uri.name.rpartition("-")[0]
                yield Finding(f"{stage} {sha[:12]}", "checkpoint-missing", f"MLflow's {model.model_id} names it")


def _check_ended(snapshot: RegistryView, store: LineageStore) -> Iterator[Finding]:
    """A run is finished in MLflow only after its record and report are signed."""
    run_id, status = run_on_record(store.output)
    run = snapshot.runs.get(run_id)
    if status == "running" and run is not None and run.info.status == "FINISHED":
        yield Finding("lifecycle.json", "run-changed", f"run {run_id[:12]} is running there, but finished in MLflow")
