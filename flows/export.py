"""`xray export` as a flow: a checkpoint with its ancestors in one archive, in `output/exports`."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from xray_runtime.kernel.history.reference import resolve
from xray_runtime.trust.bundle import export as run_export

FOLDER = "exports"


@flow(name="export", flow_run_name="export {reference}", persist_result=False)
def export(output: str, reference: str, tracking_uri: str | None = None) -> str:
    """Export `reference` (as in `xray lineage`) with its records and the public key; returns the archive's path.

    Args:
        output: output directory of lifecycles.
    """
    root = Path(output).absolute()
    store, node = resolve(reference, root, tracking_uri)
    bundle = root / FOLDER / f"{node.directory.name}.tar"
    bundle.parent.mkdir(exist_ok=True)
    count = run_export(store, node, bundle)
    size = bundle.stat().st_size / 1e6
    title = f"{node.name}: {count} checkpoints, {size:,.1f} MB"
    text = f"{title}: `{bundle}`\n\n`xray audit {bundle}` checks it; `xray import` imports it."
    create_markdown_artifact(text, key="export", description=title)
    return str(bundle)
