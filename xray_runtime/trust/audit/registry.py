"""MLflow's registry against the checkpoints and the log: versions, tags, aliases and pages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.evidence.log import LOG, view as view_log
from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.kernel.graph.artifacts import Evaluation
from xray_runtime.kernel.history.audit_check import Finding
from xray_runtime.kernel.tracking.mlflow_tracker import KEY_TAG
from xray_runtime.kernel.tracking.registry import LOG_TAG, SHA256_TAG, URI_TAG
from xray_runtime.kernel.tracking.registry_view import RegistryView
from xray_runtime.trust.model_page import FORM, PREFIX, Page, model_page, registration_of, version_page

if TYPE_CHECKING:
    from xray_runtime.kernel.history.reference import LineageStore

PAGE_CODE = "registry-page-changed"
REGISTRY_TAGS = {SHA256_TAG, URI_TAG, LOG_TAG}
"""Tags of a version that `check_registry` checks."""


def check_registry(
    mlflow: RegistryView, store: LineageStore, view: LogView, audited: set[str], everything: bool
) -> Iterator[Finding]:
    """Registered versions and aliases of `audited`; with `everything` every alias that was decided."""
    judged = {sha for sha in audited if store.graph.judgements_of(sha, Evaluation)}
    for (name, number), version in sorted(mlflow.versions.items()):
        recorded: str | None = version.tags.get("xray.sha256")
        label = f"{name}/{number}"
        pointed = mlflow.model_sha(version.source.removeprefix("models:/"))
        if recorded not in audited and pointed not in audited:
            continue
        if recorded is None or recorded != pointed:
            detail = f"it says {str(recorded)[:12]} and points to {str(pointed)[:12]}"
            yield Finding(label, "registry-changed", detail)
        elif Path(version.tags.get("xray.uri", "")).name != store.graph.nodes[recorded].directory.name:
            yield Finding(label, "registry-changed", "its tag xray.uri names another directory")
        elif recorded not in judged:
            yield Finding(label, "evaluation-missing", f"{recorded[:12]} has no evaluation in the store")
        yield from _check_version(mlflow, view, label, version)
    aliases = {(m.name, alias): str(number) for m in mlflow.registered for alias, number in m.aliases.items()}
    known = {(v.name, str(v.version)): v.tags.get("xray.sha256") for v in mlflow.versions.values()}
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
    # In a store that several directories share, another one may have decided about checkpoints copied from there.
    imported = {entry.checkpoint for entry in view.published.values() if entry.action == "bring"}
    for (name, alias), target in sorted(aliases.items()):
        version = mlflow.versions.get((name, target))
        pointed = mlflow.model_sha(version.source.removeprefix("models:/")) if version is not None else None
        here = {known.get((name, target)), pointed} & (audited - imported if store.artifacts is None else audited)
        if here and (name, alias) not in view.decided:
            yield Finding(f"{name}@{alias}", "alias-moved", f"no decision put it to version {target}")


def _check_version(mlflow: RegistryView, view: LogView, label: str, version: Any) -> Iterator[Finding]:
    """The run a version names, and the log's mark when its page was written."""
    model, run = mlflow.models.get(version.source.removeprefix("models:/")), mlflow.runs.get(version.run_id)
    key = run.data.tags.get(KEY_TAG) if run is not None else None
    if model is not None and key != model.params.get("key"):
        yield Finding(label, "registry-changed", f"it names run {version.run_id}, which is not of its stage")
    reason = view.contradicts(version.tags.get(LOG_TAG, ""))
    if reason is not None:
        yield Finding(LOG, "log-shorter", f"{reason} ({label} in MLflow)")


def check_orphans(mlflow: RegistryView, store: LineageStore, removed: set[str]) -> Iterator[Finding]:
    """LoggedModels of this output directory whose checkpoint is gone without a decision."""
    names = {node.directory.name for node in store.graph.nodes.values()}
    # A store inside the output directory moves with it; in a shared one only the path tells models apart.
    own = store.artifacts is not None
    for sha, models in sorted(mlflow.by_sha.items()):
        for model in models:
            uri = Path(model.params.get("uri", ""))
            if sha in store.graph.nodes or sha in removed or not (own or uri.parent.parent == store.output.absolute()):
                continue
            if uri.name not in names:
                stage = uri.name.rpartition("-")[0]
                yield Finding(f"{stage} {sha[:12]}", "checkpoint-missing", f"MLflow's {model.model_id} names it")


def check_pages(view: RegistryView, store: LineageStore, audited: Collection[str]) -> Iterator[Finding]:
    """The descriptions, tags and stages of registered models that have a version among `audited`."""
    decisions, described = view_log(store.output).decisions_by_version, set[str]()

    def experiment_of(run_id: str) -> str | None:
        run = view.runs.get(run_id)
        return str(run.info.experiment_id) if run is not None else None

    for (name, number), version in sorted(view.versions.items()):
        about = decisions.get((name, number), [])
        if version.tags.get(SHA256_TAG) not in audited and not {d.checkpoint for d in about} & set(audited):
            continue
        label, registration = f"{name}/{number}", registration_of(about)
        if registration is not None and registration.page not in (0, FORM):
            yield Finding(label, "registry-page-unchecked", f"form {registration.page}; this release words form {FORM}")
            continue
        try:
            page = version_page(name, about, store.graph.nodes.get, experiment_of)
        except (OSError, ValueError) as error:
            yield Finding(label, PAGE_CODE, f"its page cannot be generated again: {error}")
            continue
        if page is not None:
            described.add(name)
        tags = {tag: value for tag, value in version.tags.items() if tag not in REGISTRY_TAGS}
        yield from _differences(label, page, version.description, tags)
        if version.current_stage not in (None, "", "None"):
            yield Finding(label, PAGE_CODE, f"stage {version.current_stage}: X-ray sets none")
    for model in view.registered:
        if model.name in described:
            yield from _differences(model.name, model_page(model.name), model.description, model.tags)


def _differences(label: str, page: Page | None, description: str | None, tags: Mapping[str, str]) -> Iterator[Finding]:
    """Differences from the generated page; without one, every tag of X-ray's is unsigned."""
    expected = page.tags if page is not None else {}
    if page is not None and description != page.description:
        yield Finding(label, PAGE_CODE, "its description")
    ours = {tag for tag in tags if tag.startswith(PREFIX)} | expected.keys()
    differing = sorted(tag for tag in ours if tags.get(tag) != expected.get(tag))
    if differing:
        yield Finding(label, PAGE_CODE, f"tags: {', '.join(differing)}")
