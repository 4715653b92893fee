"""Suggestions if no plan fits: single changes with which a plan does fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.pool.machine import GIB, Machine, local_node
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.ops.planner.auto import Changes, GraphPlan, plan
from xray_runtime.ops.planner.search import MAX_DEVICES

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.graph import Graph

LORA_RANK = 16


@dataclass(frozen=True)
class Suggestion:
    """A change of `change` to `value`, with which a plan fits."""

    change: str
    """A field of `Changes`, `num_devices` or `memory_gib`."""
    value: int
    text: str
    changes: Changes
    machine: Machine


Planner = Callable[[Changes, Machine], GraphPlan]


def planner_of(graph: Graph, num_local: int | None) -> Planner:
    """A planner of `graph`. It knows the cores of a machine with `num_local` devices, which is this one."""

    def plan_for(changes: Changes, machine: Machine) -> GraphPlan:
        nodes = {"CPU": math.inf, "GPU": float(machine.num_devices)}
        if machine.num_devices == num_local:
            nodes = local_node(machine)
        elif machine.device == "cpu":
            nodes = {"CPU": float(machine.num_devices * graph.runtime.threads)}
        return plan(graph, machine, changes, [nodes])

    return plan_for


def suggest(planner: Planner, changes: Changes, planned: GraphPlan) -> Iterator[Suggestion]:
    """Yield every kind of change that makes a plan fit, as small as possible.

    Args:
        planner: plans the graph, with changes, for a machine; raises ConfigError if it does not allow them.
        planned: the plan with `changes`.
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
        text = f"{gib} GiB per device instead of {machine.memory_bytes / GIB:.3g}"
        return Suggestion("memory_gib", gib, text, changes, replace(machine, memory_bytes=gib * GIB))

    def changed(text: str, **change: Any) -> Suggestion:
        [(name, value)] = change.items()
        return Suggestion(name, int(value), text, replace(changes, **change), machine)

    def narrower(by: int) -> Suggestion:
        tokens = workload.micro_batch_tokens - by
        text = f"training passes of {tokens} tokens instead of {workload.micro_batch_tokens}; the result stays the same"
        return changed(text, micro_batch_tokens=tokens)

    def shorter(by: int) -> Suggestion:
        tokens = workload.sequence_tokens - by
        return changed(f"rows of at most {tokens} tokens instead of {workload.sequence_tokens}", row_tokens=tokens)

    enough = 2 * math.ceil(nearest.fullest.peak_bytes / GIB)
    now = math.floor(machine.memory_bytes / GIB)
    # A pass has at least one sequence, and a config allows no fewer than 16 tokens.
    written = "micro_batch_tokens" not in workload.open_choices
    most = workload.micro_batch_tokens - max(workload.sequence_tokens, 16) if written else 0
    for suggestion, low, high in (
        (devices, machine.num_devices + 1, min(64 * machine.num_devices, MAX_DEVICES)),
        (memory, now + 1, now + enough),
        (narrower, 1, most),
        (shorter, 1, workload.sequence_tokens - 16 if workload.is_long else 0),
    ):
        least = _least(suggestion, fits, low, high)
        if least is not None:
            yield least
    adapters = changed(f"LoRA adapters of rank {LORA_RANK} instead of training all weights", lora_rank=LORA_RANK)
    if fits(adapters):
        yield adapters


def _least(
    suggestion: Callable[[int], Suggestion], fits: Callable[[Suggestion], bool], low: int, high: int
) -> Suggestion | None:
    """The suggestion for the smallest n in [low, high] that fits, by bisection; None if `high` does not fit."""
    if low > high or not fits(suggestion(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(suggestion(middle)) else (middle + 1, high)
    return suggestion(low)
