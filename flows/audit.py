"""The audit as a flow that can be scheduled: it writes an artifact, and sends an event if it finds something."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from xray_runtime.kernel.credentials import strip_credentials
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store
from xray_runtime.kernel.report.rendering import markdown_table
from xray_runtime.trust.audit.checkpoints import Audit, audit as run_audit
from xray_runtime.trust.model_page import model_addresses


class NotSound(RuntimeError):
    """The audit found something."""


BROKEN_EVENT = "xray.audit.broken"
"""Event of an audit that found something, for automations."""


@flow(name="audit", flow_run_name="audit {output}", persist_result=False)
def audit(
    output: str, tracking_uri: str | None = None, public_key: str | None = None, since_verified: bool = False
) -> dict[str, Any]:
    """Audit everything in an output directory; the run fails if the audit finds something.

    Args:
        since_verified: read only what changed since the last sound audit.
    """
    root = Path(output).absolute()
    public = Path(public_key) if public_key else None
    store = open_lineage_store(root, tracking_uri)
    result = run_audit(store, public=public, since_verified=since_verified)
    create_markdown_artifact(markdown(result, _pages(store)), key="audit", description=str(root))
    content = result.to_json()
    if not result.is_sound:
        broken = [finding.to_json() for finding in result.findings if finding.is_broken]
        emit_event(
            BROKEN_EVENT,
            resource={"prefect.resource.id": f"xray.output.{root}", "prefect.resource.name": root.name},
            payload={"findings": broken[:50], "count": len(broken)},
        )
        raise NotSound(f"{len(broken)} findings, the first: {broken[0]['code']} {broken[0]['subject']}")
    return content


def _pages(store: LineageStore) -> list[str]:
    """Links to MLflow's pages of the registered versions; [] if no server shows them."""
    uri = store.tracking_uri or ""
    if not uri.startswith("http"):
        return []
    server = strip_credentials(uri).rstrip("/")
    return [f"[{page.removeprefix('#/models/')}]({server}/{page})" for page in model_addresses(store.output, None)]


def markdown(result: Audit, pages: Sequence[str] = ()) -> str:
    """An audit as Markdown; `pages`: links to the audited models."""
    lines = [
        f"**{'sound' if result.is_sound else 'NOT SOUND'}**: {result.checkpoints} checkpoints, {result.files} files"
    ]
    lines += [f"\n{note}" for note in result.notes]
    if pages:
        lines.append(f"\nIn MLflow: {', '.join(pages)}")
    rows = []
    for finding in result.findings:
        cells = (finding.code, finding.subject, finding.detail, str(finding.to_json()["mend"]))
        rows.append(("broken" if finding.is_broken else "note", *(cell.replace("<", "&lt;") for cell in cells)))
    if rows:
        lines += ["", *markdown_table(("", "what", "where", "detail", "how to mend"), rows)]
    return "\n".join(lines)
