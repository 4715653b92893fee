"""A run of the shipped lifecycle, inside a flow (`flows/lifecycle.py`, `flows/own_lifecycle.py`)."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment

from xray.flows.lifecycle_graph import lifecycle_graph, record_options, recorded_graph
from xray.tasks.prefect_run import show
from xray.tasks.preflight import check_run
from xray.tasks.workspace import Workspace
from xray_runtime.cluster.pool.nodes import nodes
from xray_runtime.cluster.pool.placement import with_device
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store
from xray_runtime.kernel.history.render import lineage_mermaid, lineage_text, selection
from xray_runtime.kernel.processes import redirect_output
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.trust.page import write_html


def run_lifecycle(config: LifecycleConfig, output: str, until: str | None) -> dict[str, Any]:
    """Run a whole lifecycle into the directory `output`; returns the content of lifecycle.json.

    Args:
        until: the last stage to compute; nothing is registered then.
    """
    root = Path(output).absolute()
    root.mkdir(parents=True, exist_ok=True)
    prepare_deployment(root)
    # Check the whole graph before anything is computed; `auto` chooses layouts as stages are called.
    check_run(recorded_graph(config), with_device(config.runtime).device, nodes(), root)
    with open_workspace(config, root, until=until, checked=True) as workspace:
        ends = lifecycle_graph(config)
        workspace.register(ends.policy, ends.evaluation)
    publish(workspace)
    return workspace.run_record.summary.content


def open_workspace(config: LifecycleConfig, root: Path, **options: Any) -> Workspace:
    """A workspace for a lifecycle's config in the directory `root`."""
    return Workspace(root, runtime=config.runtime, **record_options(config) | options)


def publish(workspace: Workspace) -> None:
    """Publish the results of a finished run as artifacts on its page."""
    text = workspace.run_record.summary.markdown(workspace.run_record.tracker.page)
    show("lifecycle", f"{workspace.project}: {workspace.output}", text)
    store = open_lineage_store(workspace.output, workspace.run_record.tracking_uri)
    for result in workspace.final_results():
        _publish_lineage(store, store.graph.nodes[result.sha256])


def _publish_lineage(store: LineageStore, node: Node) -> None:
    """Write `output/lineage/CHECKPOINT.html`, and an artifact `lineage` of the current flow run that links to it."""
    output = store.output.absolute()
    page = output / "lineage" / f"{node.directory.name}.html"
    page.parent.mkdir(exist_ok=True)
    write_html(page, store, node, selection(store.graph, node, False))
    evidence().log_files(output, [page], "lineage")
    fence = "```"
    lines = [
        f"Lineage of `{node.sha256[:12]}`, with config, results and files: [{page}]({page.as_uri()})",
        "",
        *(f"{fence}mermaid", *lineage_mermaid(store.graph, node), fence),
        "",
        *(f"{fence}text", *(line.replace("`", "'") for line in lineage_text(store.graph, node, False)), fence),
    ]
    create_markdown_artifact("\n".join(lines), key="lineage", description=f"lineage of {node.name}")


def prepare_deployment(root: Path) -> None:
    """In a process of a Prefect worker: log the output, and make a snapshot when the run is cancelled."""
    if deployment.id is None or threading.current_thread() is not threading.main_thread():
        return
    # This process's output is a pipe that closes with the worker.
    redirect_output(root / "logs" / "lifecycle.log")
    # Ray installed a handler that aborts.
    signal.signal(signal.SIGTERM, terminate)


def terminate(*_: Any) -> None:
    """Signal handler: end the flow as cancelled."""
    # A second signal must not interrupt the snapshot.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise TerminationSignal(signal.SIGTERM)
