"""`xray prune` as a flow: show checkpoints that nothing needs any more, and remove them on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from xray.tasks.output_directory import require_no_run
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.trust.retention import plan_prune, prune as run_prune


@flow(name="prune", flow_run_name="prune {output}", persist_result=False)
def prune(output: str, keep: list[str] | None = None, remove: bool = False) -> dict[str, Any]:
    """Find checkpoints that no alias, nothing in `keep` and no evaluation needs; ancestors of kept ones are kept.

    Args:
        output: output directory of lifecycles.
        keep: also keep these with their ancestors; each as in `xray lineage`.
        remove: remove them, unless a run is active. Without it they are only listed.
    """
    root = Path(output).absolute()
    if remove:
        require_no_run(root)
    store = open_lineage_store(root, None)
    plan = plan_prune(store, [resolve(reference, root, None)[1] for reference in keep or []])
    if remove:
        run_prune(store, plan)
    verb = "removed" if remove else "would go"
    lines = [f"**{len(plan.remove)} of {len(plan.remove) + len(plan.keep)} {verb}**: {plan.bytes / 1e6:,.1f} MB", ""]
    lines += [f"- {node.directory.name}" for node in plan.remove]
    create_markdown_artifact("\n".join(lines), key="prune", description=str(root))
    return {
        "remove": [node.sha256 for node in plan.remove],
        "keep": [node.sha256 for node in plan.keep],
        "bytes": plan.bytes,
        "removed": remove,
    }
