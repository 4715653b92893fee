"""`xray plan`: where the models of a lifecycle would go on a machine, before anything is started."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from xray.deployments.local_services import quiet_environment
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import load_config
from xray_runtime.config.validation import ConfigError
from xray_runtime.planning.auto import plan_config
from xray_runtime.planning.demand import check_config
from xray_runtime.planning.memory import Layout, Memory
from xray_runtime.planning.plan import MAX_DEVICES, Plan, RolePlan, search
from xray_runtime.planning.suggestions import Changes, Suggestion, suggest
from xray_runtime.planning.workload import GIB, Machine, local_node, this_machine
from xray_runtime.report.terminal import print_table

BAD_INPUT = 2

Planner = Callable[[Changes, Machine], Plan]

COLUMNS = {
    "states": ("weights", "gradients", "optimizer"),
    "passes": ("activations", "logits"),
    "KV": ("kv_cache",),
    "other": ("buffers", "process"),
}
"""Columns of the table over fields of `Memory`; the JSON has every field."""


def plan(
    config: Annotated[Path | None, typer.Argument(help="YAML file with the lifecycle's config.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field; repeatable.")
    ] = None,
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
    """Choose layout and placement of a PPO stage's models, with the memory each device needs.

    Exit codes: 0 planned (whether it fits is in the plan), 2 bad input.
    """
    quiet_environment()
    try:
        rank = _number("--lora-rank", lora_rank, 1, 4096, whole=True)
        changes = Changes(lora_rank=None if rank is None else int(rank), offload=offload)
        planner, machine = _read(config, overrides or [], params, devices, memory_gib, sequence_tokens)
        chosen = planner(changes, machine)
    except (ConfigError, ValueError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(BAD_INPUT) from None
    suggestions = [] if chosen.fits else list(suggest(planner, changes, chosen))
    content = as_dict(chosen, suggestions)
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        _show(Console(), chosen, content)


def _of_config(config: LifecycleConfig, here: int | None) -> Planner:
    """Plans `config`; of a machine with `here` devices, which is this one, the cores are known as well."""

    def plan_for(changes: Changes, machine: Machine) -> Plan:
        nodes = {"CPU": math.inf, "GPU": float(machine.num_devices)}
        if machine.num_devices == here:
            nodes = local_node(machine)
        elif machine.device == "cpu":
            nodes = {"CPU": float(machine.num_devices * config.runtime.threads)}

        def check(chosen: LifecycleConfig) -> None:
            check_config(chosen, recorded_graph(chosen), machine.device, [nodes])

        return plan_config(changes.of_config(config), machine, check)

    return plan_for


def _of_parameters(count: float, sequence_tokens: int) -> Planner:
    return lambda changes, machine: search(changes.of_parameters(count, sequence_tokens), machine)


def as_dict(chosen: Plan, suggestions: list[Suggestion]) -> dict[str, Any]:
    """The plan for programs. GB are 10⁹ bytes, `memory_gib` 2³⁰; a role's memory is that of one of its devices."""
    machine, workload = chosen.machine, chosen.workload
    policy = workload.roles[0]
    states = {
        str(stage): workload.memory(policy, Layout(zero_stage=stage, dp=machine.num_devices)) for stage in range(4)
    }
    return {
        "fits": chosen.fits,
        "placement": chosen.placement,
        "in_turn": chosen.fullest.in_turn,
        "num_devices": machine.num_devices,
        "memory_gib": round(machine.memory_bytes / GIB, 3),
        "usable_gb": _gb(machine.usable_bytes),
        "peak_gb": _gb(chosen.fullest.peak_bytes),
        "layout": {
            p.role.name: {
                "zero_stage": p.layout.zero_stage,
                "tp": p.layout.tp,
                "pp": p.layout.pp,
                "dp": p.layout.dp,
                "checkpointing": p.role.options.checkpointing,
                "num_devices": p.layout.num_devices,
            }
            for p in chosen.roles
        },
        "training": {
            p.role.name: {
                "weight_bytes": p.role.weight_bytes,
                "lora_rank": p.role.options.lora_rank,
                "offload": p.role.options.offload,
            }
            for p in chosen.roles
            if p.role.use == "train"
        },
        "memory_gb": {p.role.name: _gb(p.memory.total) for p in chosen.roles},
        "breakdown_gb": {
            p.role.name: {field.name: _gb(getattr(p.memory, field.name)) for field in fields(Memory)}
            for p in chosen.roles
        },
        "parameters": policy.shape.num_parameters,
        "model_state_gb": {stage: _gb(m.weights + m.gradients + m.optimizer) for stage, m in states.items()},
        "limits": [_limit(chosen)],
        "reasons": list(chosen.reasons),
        "suggestions": [{"change": s.change, "value": s.value, "text": s.text} for s in suggestions],
    }


def _limit(chosen: Plan) -> str:
    group = chosen.fullest
    largest, part, size = group.largest()
    return (
        f"the fullest device needs {_short(group.peak_bytes)} of {_short(chosen.machine.usable_bytes)} usable GB, most "
        f"of it {largest.role.name}'s {part.replace('_', ' ')} ({_short(size)} GB)"
    )


def _show(console: Console, chosen: Plan, content: dict[str, Any]) -> None:
    machine = chosen.machine
    console.print(
        f"{content['parameters'] / 1e6:,.1f}M parameters, sequences of {chosen.workload.sequence_tokens} tokens, "
        f"{machine.num_devices} devices of {machine.memory_bytes / GIB:.3g} GiB",
        highlight=False,
    )
    verdict = "" if chosen.fits else "[red]nothing fits; nearest:[/red] "
    turn = ", generator and trainers in turn" if content["in_turn"] else ""
    console.print(f"{verdict}[bold]{chosen.placement}[/bold]{turn}", highlight=False)
    console.print("GB on one device", style="italic")
    sizes, rows = (*COLUMNS, "total"), []
    for p in chosen.roles:
        parts = [sum(getattr(p.memory, part) for part in parts) for parts in COLUMNS.values()]
        cells = (_short(size) for size in (*parts, p.memory.total))
        rows.append((p.role.name, str(p.layout.num_devices), *cells, _words(p)))
    print_table(console, ("role", "devices", *sizes, "layout"), rows, right=sizes)
    states = "  ".join(f"{stage}: {size:.4g}" for stage, size in content["model_state_gb"].items())
    console.print(
        f"[bold]policy's states[/bold] over all devices by ZeRO stage, GB  {states}", highlight=False, soft_wrap=True
    )
    for title, lines in (
        ("limit", content["limits"]),
        ("not", content["reasons"]),
        ("would fit with", [s["text"] for s in content["suggestions"]]),
    ):
        for line in lines:
            console.print(f"[bold]{title}[/bold]  {line}", highlight=False, soft_wrap=True)


def _words(p: RolePlan) -> str:
    layout = p.layout
    words = [f"ZeRO-{layout.zero_stage}"] if p.role.use == "train" or layout.zero_stage else []
    words += [f"{name}{n}" for name, n in (("TP", layout.tp), ("PP", layout.pp), ("DP", layout.dp)) if n > 1]
    options = p.role.options
    words += ["bf16"] if options.float32_sums else []
    words += [f"LoRA {options.lora_rank}"] if options.lora_rank else []
    words += ["offload"] if options.offload else []
    words += ["recompute"] if options.checkpointing else []
    return " ".join(words) or "whole"


def _read(
    config: Path | None,
    overrides: list[str],
    params: str | None,
    devices: str | None,
    memory_gib: str | None,
    sequence_tokens: str | None,
) -> tuple[Planner, Machine]:
    if (config is None) == (params is None):
        given = "both are given" if config is not None else "neither is given"
        raise ConfigError(f"CONFIG, --params: {given}, must be one of them")
    num_devices = _number("--devices", devices, 1, MAX_DEVICES, whole=True)
    memory = _number("--memory-gib", memory_gib, 1 / 16, 65_536)
    length = _number("--sequence-tokens", sequence_tokens, 2, 2**24, whole=True)
    if config is None:
        count = _number("--params", params, 1e6, 1e13)
        assert count is not None
        if overrides:
            raise ConfigError(f"--set: {json.dumps(overrides[0])} is not allowed: must be given with a CONFIG")
        return _of_parameters(count, int(length or 1024)), _machine("auto", num_devices, memory)
    if length is not None:
        raise ConfigError(
            f"--sequence-tokens: {sequence_tokens} is not allowed: must be given with --params; a CONFIG has "
            "data.max_prompt_tokens and ppo.stages.N.max_new_tokens"
        )
    resolved = load_config(config, overrides)
    machine = _machine(resolved.runtime.device, num_devices, memory, resolved.runtime.threads)
    return _of_config(resolved, machine.num_devices if num_devices is None else None), machine


def _machine(device: str, num_devices: float | None, memory_gib: float | None, threads: int = 1) -> Machine:
    """The machine described, what is not described being this machine's."""
    if num_devices is not None and memory_gib is not None:
        described = Machine(num_devices=int(num_devices), memory_bytes=int(memory_gib * GIB))
        return replace(described, device="cpu") if device == "cpu" else described
    here = this_machine(device, threads)
    count = here.num_devices if num_devices is None else int(num_devices)
    each = here.memory_bytes if here.device == "cuda" else here.memory_bytes * here.num_devices // count
    return replace(here, num_devices=count, memory_bytes=each if memory_gib is None else int(memory_gib * GIB))


def _number(option: str, text: str | None, low: float, high: float, *, whole: bool = False) -> float | None:
    """`text` as a number from `low` to `high`. Options arrive as text, so that a wrong one is one line of ours."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        shown = json.dumps(text, ensure_ascii=False) if math.isnan(value) else text
        raise ConfigError(f"{option}: {shown} is not allowed: must be {kind} from {low:g} to {high:g}")
    return value


def _short(size: int) -> str:
    gb = size / 1e9
    return "" if not size else f"{gb:.{0 if gb >= 100 else 1 if gb >= 10 else 2}f}"


def _gb(size: float) -> float:
    return round(size / 1e9, 4)
