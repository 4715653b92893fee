"""`xray plan` as a flow: the placement of a config's models on this or a described machine."""

from __future__ import annotations

import io
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from pydantic import Field
from rich.console import Console

from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.ops.planner.auto import UNCHANGED
from xray_runtime.ops.planner.description import as_dict, machine_of, show
from xray_runtime.ops.planner.precision import slow_precision
from xray_runtime.ops.planner.search import MAX_DEVICES
from xray_runtime.ops.planner.suggestions import planner_of, suggest

COLUMNS = 140


@flow(name="plan", flow_run_name="plan {config.project}", persist_result=False)
def plan(
    config: LifecycleConfig,
    num_devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None,
    memory_gib: Annotated[float, Field(ge=1 / 16, le=65_536)] | None = None,
) -> dict[str, Any]:
    """Plan the models of `config` without reading weights; returns the output of `xray plan --json`.

    Args:
        num_devices: number of devices, to plan for another machine.
        memory_gib: memory of one device, to plan for another machine.
    """
    machine = machine_of(config.runtime.device, num_devices, memory_gib, config.runtime.threads)
    graph = recorded_graph(config)
    planner = planner_of(graph, machine.num_devices if num_devices is None else None)
    chosen = planner(UNCHANGED, machine)
    suggestions = [] if chosen.fits else list(suggest(planner, UNCHANGED, chosen))
    content = as_dict(chosen, suggestions, slow_precision(graph, machine.device))
    text = io.StringIO()
    show(Console(file=text, width=COLUMNS), chosen, content)
    verdict = "it fits" if chosen.fits else "it does not fit"
    create_markdown_artifact(f"```text\n{text.getvalue()}```", key="plan", description=f"{config.project}: {verdict}")
    return content
