"""Output of `xray plan`: the table, the JSON, the machine it describes, and whether its processor is slow."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from xray_runtime.cluster.pool.machine import GIB, Machine, this_machine
from xray_runtime.kernel.terminal import print_table
from xray_runtime.models.shapes import ModelShape
from xray_runtime.ops.planner.auto import GraphPlan
from xray_runtime.ops.planner.cost import COMPARED, gpu_of
from xray_runtime.ops.planner.disk import disk_bytes
from xray_runtime.ops.planner.memory import Layout
from xray_runtime.ops.planner.plan import Plan, most_row_tokens
from xray_runtime.ops.planner.suggestions import Suggestion

COLUMNS = {
    "states": ("weights", "gradients", "optimizer"),
    "passes": ("activations", "logits"),
    "KV": ("kv_cache",),
    "other": ("buffers", "graphs", "process"),
}
"""Column of the table → fields of `Memory`; the JSON has every field."""


def as_dict(planned: GraphPlan, suggestions: list[Suggestion], note: str | None) -> dict[str, Any]:
    """The plan as JSON: the fullest stage, and in `stages` every stage that has models.

    GB are 10⁹ bytes, `memory_gib` 2³⁰; a role's memory is for one of its devices.
    """
    chosen = planned.stages[planned.fullest]
    machine = chosen.machine
    trained = [(p.workload, role) for p in [chosen, *planned.stages.values()] for role in p.workload.of_use("trained")]
    workload, policy = trained[0] if trained else (chosen.workload, chosen.workload.roles[0])
    content: dict[str, Any] = {
        "fits": planned.fits,
        "stage": planned.fullest,
        "num_devices": machine.num_devices,
        "memory_gib": round(machine.memory_bytes / GIB, 3),
        "usable_gb": _gb(machine.usable_bytes),
        **_stage(chosen),
        "parameters": policy.shape.num_parameters,
        **_mixture(policy.shape, workload.micro_batch_tokens),
        "limits": [_limit(chosen)],
        "notes": [text for text in (note, _uncompared(machine)) if text],
        "reasons": list(chosen.reasons),
        "suggestions": [{"change": s.change, "value": s.value, "text": s.text} for s in suggestions],
        "stages": {name: _stage(plan) for name, plan in planned.stages.items()},
    }
    if policy.use == "trained":
        states = {
            str(stage): workload.memory(policy, Layout(zero_stage=stage, dp=machine.num_devices)) for stage in range(4)
        }
        content["model_state_gb"] = {s: _gb(m.weights + m.gradients + m.optimizer) for s, m in states.items()}
    return content


def _mixture(shape: ModelShape, tokens: int) -> dict[str, Any]:
    """The size of a mixture of experts for one token, and what its experts hold and do in a pass over `tokens`."""
    if (experts := shape.experts) is None:
        return {}
    return {
        "active_parameters": shape.active_parameters,
        "experts": asdict(experts) | {"tokens_each": round(tokens * experts.chosen / experts.number, 3)},
    }


def _stage(chosen: Plan) -> dict[str, Any]:
    return {
        "placement": chosen.placement,
        "max_num_seqs": chosen.max_num_seqs,
        "in_turn": chosen.workload.generator_sleeps,
        "trainer_sleeps": chosen.workload.trainer_sleeps,
        "micro_batch_tokens": chosen.workload.micro_batch_tokens,
        "sequence_tokens": chosen.workload.sequence_tokens,
        "most_sequence_tokens": most_row_tokens(chosen),
        "seconds": {phase: round(seconds, 3) for phase, seconds in chosen.seconds.items()},
        "iteration_seconds": round(chosen.iteration_s, 3),
        "overlaps": chosen.overlaps,
        "bottleneck": chosen.bottleneck,
        "disk_gb": {what: _gb(size) for what, size in disk_bytes(chosen.workload).items()},
        "peak_gb": _gb(chosen.fullest.peak_bytes),
        "layout": {
            p.role.name: asdict(p.layout)
            | {"checkpointing": p.role.options.checkpointing, "num_devices": p.layout.num_devices}
            for p in chosen.roles
        },
        "training": {
            p.role.name: {
                "weight_bytes": p.role.weight_bytes,
                "lora_rank": p.role.options.lora_rank,
                "offload": p.role.options.offload,
            }
            for p in chosen.roles
            if p.role.use == "trained"
        },
        "memory_gb": {p.role.name: _gb(p.memory.total) for p in chosen.roles},
        "breakdown_gb": {
            p.role.name: {part: _gb(size) for part, size in asdict(p.memory).items()} for p in chosen.roles
        },
    }


def _uncompared(machine: Machine) -> str | None:
    """A note that seconds for this GPU were never compared with a run."""
    if machine.device == "cpu" or (gpu := gpu_of(machine.memory_bytes)).name in COMPARED:
        return None
    return (
        f"seconds for {gpu.name} follow from its data sheet and were compared with no run; those for "
        f"{' and '.join(COMPARED)} are within a factor of two of published ones"
    )


def _limit(chosen: Plan) -> str:
    group = chosen.fullest
    largest, part, size = group.largest()
    row = f" for a row of {chosen.workload.row_tokens} tokens" * (part == "activations" and chosen.workload.is_long)
    return (
        f"the fullest device needs {_short(group.peak_bytes)} of {_short(chosen.machine.usable_bytes)} usable GB, most "
        f"of it {largest.role.name}'s {part.replace('_', ' ')} ({_short(size)} GB){row}"
    )


def show(console: Console, planned: GraphPlan, content: dict[str, Any]) -> None:
    """Print the memory of each stage's models, and the limit of the fullest stage."""
    chosen = planned.stages[planned.fullest]
    machine = chosen.machine
    active = ""
    if (experts := content.get("experts")) is not None:
        active = (
            f" ({content['active_parameters'] / 1e6:,.1f}M for a token, {experts['parameters'] / 1e6:,.1f}M in "
            f"{experts['number']} experts a layer, {experts['tokens_each']:.4g} tokens an expert and pass)"
        )
    console.print(
        f"{content['parameters'] / 1e6:,.1f}M parameters{active}, "
        f"sequences of {chosen.workload.sequence_tokens} tokens, {machine.num_devices} devices of "
        f"{machine.memory_bytes / GIB:.3g} GiB",
        highlight=False,
    )
    verdict = "" if planned.fits else "[red]no plan fits; nearest:[/red] "
    turn = ", generator and other models in turn" if content["in_turn"] else ""
    at = f" ({planned.fullest})" if len(planned.stages) > 1 else ""
    console.print(f"{verdict}[bold]{chosen.placement}[/bold]{turn}{at}", highlight=False)
    console.print("GB on one device", style="italic")
    sizes, rows = (*COLUMNS, "total"), []
    for stage, plan in planned.stages.items():
        for number, p in enumerate(plan.roles):
            parts = [sum(getattr(p.memory, part) for part in parts) for parts in COLUMNS.values()]
            cells = (_short(size) for size in (*parts, p.memory.total))
            name = stage if not number else ""
            rows.append((name, p.role.name, str(p.layout.num_devices), *cells, p.layout_text))
    print_table(console, ("stage", "model", "devices", *sizes, "layout"), rows, right=sizes)
    for stage, plan in planned.stages.items():
        if plan.seconds:
            console.print(f"[bold]seconds[/bold]  {stage}: {_seconds_text(plan)}", highlight=False, soft_wrap=True)
    for stage, plan in planned.stages.items():
        if plan.workload.of_use("trained") and (most := most_row_tokens(plan)):
            tokens = f"{plan.workload.sequence_tokens:,} tokens planned, at most {most:,} fit this layout"
            console.print(f"[bold]rows[/bold]  {stage}: {tokens}", highlight=False, soft_wrap=True)
    for stage, plan in planned.stages.items():
        disk = ", ".join(f"{what} {_short(size)}" for what, size in disk_bytes(plan.workload).items())
        if disk:
            console.print(f"[bold]disk, GB[/bold]  {stage}: {disk}", highlight=False, soft_wrap=True)
    states = "  ".join(f"{stage}: {size:.4g}" for stage, size in content.get("model_state_gb", {}).items())
    if states:
        text = f"[bold]policy's states[/bold] over all devices by ZeRO stage, GB  {states}"
        console.print(text, highlight=False, soft_wrap=True)
    for title, lines in (
        ("limit", content["limits"]),
        ("note", content["notes"]),
        ("not", content["reasons"]),
        ("would fit with", [s["text"] for s in content["suggestions"]]),
    ):
        for line in lines:
            console.print(f"[bold]{title}[/bold]  {line}", highlight=False, soft_wrap=True)


def _seconds_text(plan: Plan) -> str:
    """An iteration by phase, estimated by the cost model."""
    phases = ", ".join(f"{phase} {seconds:.3g}" for phase, seconds in plan.seconds.items())
    turns = ["generator"] * plan.workload.generator_sleeps + ["trainer"] * plan.workload.trainer_sleeps
    asleep = f"; asleep in turn: {', '.join(turns)}" if turns else ""
    beside = "; generate while the others score and update" if plan.overlaps else ""
    return f"{plan.iteration_s:.3g} an iteration ({phases}{beside}), most in {plan.bottleneck}{asleep}"


def machine_of(device: str, num_devices: float | None, memory_gib: float | None, threads: int = 1) -> Machine:
    """The described machine; values that are None come from this machine."""
    if num_devices is not None and memory_gib is not None:
        described = Machine(num_devices=int(num_devices), memory_bytes=int(memory_gib * GIB))
        return replace(described, device="cpu") if device == "cpu" else described
    local = this_machine(device, threads)
    count = local.num_devices if num_devices is None else int(num_devices)
    each = local.memory_bytes if local.device == "cuda" else local.memory_bytes * local.num_devices // count
    return replace(local, num_devices=count, memory_bytes=each if memory_gib is None else int(memory_gib * GIB))


def _short(size: int) -> str:
    gb = size / 1e9
    return "" if not size else f"{gb:.{0 if gb >= 100 else 1 if gb >= 10 else 2}f}"


def _gb(size: float) -> float:
    return round(size / 1e9, 4)
