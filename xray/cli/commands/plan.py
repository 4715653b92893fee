"""`xray plan`: layout and placement of a graph's models on a machine, without starting anything."""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer
from rich.console import Console

from xray.cli.options import Overrides
from xray.flows.subject import read_subject
from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.ops.planner.auto import Changes, GraphPlan
from xray_runtime.ops.planner.description import as_dict, machine_of, show
from xray_runtime.ops.planner.precision import slow_precision
from xray_runtime.ops.planner.search import MAX_DEVICES, search
from xray_runtime.ops.planner.suggestions import Planner, planner_of, suggest

PANEL = "Run"
DENSE = "--params plans dense models; a mixture of experts with as many parameters needs other memory and time"


def command(
    target: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG|MODULE:FLOW", help="YAML file of a lifecycle, or a flow of your own."),
    ] = None,
    overrides: Overrides = None,
    params: Annotated[
        str | None,
        typer.Option(metavar="N", help="Plan five models of N parameters in mixed precision, without a CONFIG."),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="N", help="Number of devices. Default: this machine's.")
    ] = None,
    memory_gib: Annotated[
        str | None, typer.Option(metavar="GIB", help="Memory of one device. Default: this machine's.")
    ] = None,
    sequence_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="With --params: tokens of prompt and reply together. Default: 1024.")
    ] = None,
    lora_rank: Annotated[str | None, typer.Option(metavar="R", help="Train LoRA adapters of this rank.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Keep optimizer states in host memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Choose layout and placement of each stage's models, with the memory each device needs.

    Exit codes: 0 planned (whether it fits is in the plan), 2 bad input.
    """
    try:
        rank = _number("--lora-rank", lora_rank, 1, 4096, is_whole=True)
        changes = Changes(lora_rank=None if rank is None else int(rank), offload=offload)
        planner, machine, slow = _read(target, overrides or [], params, devices, memory_gib, sequence_tokens)
        chosen = planner(changes, machine)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    suggestions = [] if chosen.fits else list(suggest(planner, changes, chosen))
    content = as_dict(chosen, suggestions, slow)
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        show(Console(), chosen, content)


def _of_parameters(count: float, sequence_tokens: int) -> Planner:
    return lambda changes, machine: GraphPlan({"ppo": search(changes.of_parameters(count, sequence_tokens), machine)})


def _read(
    target: str | None,
    overrides: list[str],
    params: str | None,
    devices: str | None,
    memory_gib: str | None,
    sequence_tokens: str | None,
) -> tuple[Planner, Machine, str | None]:
    """(planner, machine, a note about the plan or None)."""
    if (target is None) == (params is None):
        given = "both are given" if target is not None else "neither is given"
        raise ConfigError(f"CONFIG, --params: {given}; exactly one is required")
    num_devices = _number("--devices", devices, 1, MAX_DEVICES, is_whole=True)
    memory = _number("--memory-gib", memory_gib, 1 / 16, 65_536)
    length = _number("--sequence-tokens", sequence_tokens, 2, 2**24, is_whole=True)
    if target is None:
        count = _number("--params", params, 1e6, 1e13)
        assert count is not None
        if overrides:
            raise ConfigError(f"--set: {json.dumps(overrides[0])} is not allowed: must be given with a CONFIG")
        return _of_parameters(count, int(length or 1024)), machine_of("auto", num_devices, memory), DENSE
    if length is not None:
        raise ConfigError(
            f"--sequence-tokens: {sequence_tokens} is not allowed: must be given with --params; a graph has its own "
            "lengths: max_prompt_tokens, max_new_tokens"
        )
    graph = read_subject(target, overrides).recorded()
    machine = machine_of(graph.runtime.device, num_devices, memory, graph.runtime.threads)
    slow = slow_precision(graph, machine.device)
    return planner_of(graph, machine.num_devices if num_devices is None else None), machine, slow


def _number(option: str, text: str | None, low: float, high: float, *, is_whole: bool = False) -> float | None:
    """`text` as a number from `low` to `high`. Options are text, so that errors have X-ray's form."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or (is_whole and value != int(value)):
        kind = "a whole number" if is_whole else "a number"
        shown = json.dumps(text, ensure_ascii=False) if math.isnan(value) else text
        raise ConfigError(f"{option}: {shown} is not allowed: must be {kind} from {low:g} to {high:g}")
    return value
