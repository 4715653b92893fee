"""MLflow's pages of registered models against the signed records they are generated from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.decisions import decisions_by_version
from xray_runtime.lineage.model_page import FORM, PREFIX, Page, model_page, registration_of, version_page
from xray_runtime.lineage.reference import LineageStore
from xray_runtime.tracking.registry import LOG_TAG, SHA256_TAG, URI_TAG

if TYPE_CHECKING:
    from xray_runtime.lineage.audit.registry import RegistryView

CODE = "registry-page-changed"
REGISTRY_TAGS = {SHA256_TAG, URI_TAG, LOG_TAG}
"""Tags of a version that `audit/registry.py` checks."""


def check_pages(view: RegistryView, store: LineageStore, audited: Collection[str]) -> Iterator[Finding]:
    """The descriptions, tags and stages of registered models that have a version among `audited`."""
    decisions, described = decisions_by_version(store.output), set[str]()

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
            yield Finding(label, CODE, f"its page cannot be generated again: {error}")
            continue
        if page is not None:
            described.add(name)
        tags = {tag: value for tag, value in version.tags.items() if tag not in REGISTRY_TAGS}
        yield from _differences(label, page, version.description, tags)
        if version.current_stage not in (None, "", "None"):
            yield Finding(label, CODE, f"stage {version.current_stage}: X-ray sets none")
    for model in view.registered:
        if model.name in described:
            yield from _differences(model.name, model_page(model.name), model.description, model.tags)


def _differences(label: str, page: Page | None, description: str | None, tags: Mapping[str, str]) -> Iterator[Finding]:
    """Where a page is not the generated one; without one, tags of ours are what nobody vouches for."""
    expected = page.tags if page is not None else {}
    if page is not None and description != page.description:
        yield Finding(label, CODE, "its description")
    ours = {tag for tag in tags if tag.startswith(PREFIX)} | expected.keys()
    differing = sorted(tag for tag in ours if tags.get(tag) != expected.get(tag))
    if differing:
        yield Finding(label, CODE, f"tags: {', '.join(differing)}")
