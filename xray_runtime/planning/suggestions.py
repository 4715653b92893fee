"""What to change where no plan fits: single changes, each of which was planned again and does fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xray_runtime.config.validation import ConfigError
from xray_runtime.planning.auto import GraphPlan, plan
from xray_runtime.planning.changes import Changes
from xray_runtime.planning.plan import MAX_DEVICES
from xray_runtime.planning.workload import GIB, Machine, local_node

if TYPE_CHECKING:
    from xray_runtime.graph.graph import Graph

LORA_RANK = 16


@dataclass(frozen=True)
class Suggestion:
    """Set `change` to `value`, and a plan fits."""

    change: str
    """A field of `Changes`, `num_devices` or `memory_gib`."""
    value: int
    text: str
    changes: Changes
    machine: Machine


Planner = Callable[[Changes, Machine], GraphPlan]


def planner_of(graph: Graph, here: int | None) -> Planner:
    """Plans `graph`; of a machine with `here` devices, which is this one, the cores are known as well."""

    def plan_for(changes: Changes, machine: Machine) -> GraphPlan:
        nodes = {"CPU": math.inf, "GPU": float(machine.num_devices)}
        if machine.num_devices == here:
            nodes = local_node(machine)
        elif machine.device == "cpu":
            nodes = {"CPU": float(machine.num_devices * graph.runtime.threads)}
        return plan(graph, machine, changes, [nodes])

    return plan_for


def suggest(planner: Planner, changes: Changes, planned: GraphPlan) -> Iterator[Suggestion]:
    """Every kind of change that alone makes a plan fit, by as little as it takes.

    Args:
        planner: plans the graph, with changes, for a machine; raises ConfigError where it does not allow them.
        planned: what it came to with `changes`.
    """
    nearest = planned.stages[planned.fullest]
    machine, workload = nearest.machine, nearest.workload

    def fits(suggestion: Suggestion) -> bool:
        try:
            return planner(suggestion.changes, suggestion.machine).fits
        except ConfigError:
            return False

    def devices(n: int) -> Suggestion:
        text = f"{n} devices of this size instead of {machine.num_devices}"
        return Suggestion("num_devices", n, text, changes, replace(machine, num_devices=n))

    def memory(gib: int) -> Suggestion:
        text = f"{gib} GiB a device instead of {machine.memory_bytes / GIB:.3g}"
        return Suggestion("memory_gib", gib, text, changes, replace(machine, memory_bytes=gib * GIB))

    def changed(text: str, **change: Any) -> Suggestion:
        [(name, value)] = change.items()
        return Suggestion(name, int(value), text, replace(changes, **change), machine)

    def narrower(by: int) -> Suggestion:
        tokens = workload.micro_batch_tokens - by
        text = f"training passes of {tokens} tokens instead of {workload.micro_batch_tokens}; the result stays the same"
        return changed(text, micro_batch_tokens=tokens)

    enough = 2 * math.ceil(nearest.fullest.peak_bytes / GIB)
    now = math.floor(machine.memory_bytes / GIB)
    # One sequence is the least of a pass, and 16 tokens the least that a config takes.
    most = workload.micro_batch_tokens - max(workload.sequence_tokens, 16)
    for suggestion, low, high in (
        (devices, machine.num_devices + 1, MAX_DEVICES),
        (memory, now + 1, now + enough),
        (narrower, 1, most),
    ):
        least = _least(suggestion, fits, low, high)
        if least is not None:
            yield least
    simple = [
        changed("a generator that gives its memory back while the others work", generator_sleeps=True),
        changed(f"LoRA adapters of rank {LORA_RANK} instead of training all weights", lora_rank=LORA_RANK),
        changed("optimizer states in host memory (ZeRO-Offload)", offload=True),
    ]
    yield from (suggestion for suggestion in simple if fits(suggestion))


def _least(
    suggestion: Callable[[int], Suggestion], fits: Callable[[Suggestion], bool], low: int, high: int
) -> Suggestion | None:
    """That of the least n in [low, high] which fits, where all above it do too; None: not even `high`."""
    if low > high or not fits(suggestion(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(suggestion(middle)) else (middle + 1, high)
    return suggestion(low)
