"""The planner of a stage, for `xray plan` and `auto`: the first candidate that fits and is accepted.

Candidates come in order of preference: on GPUs the fastest by the cost model first, on CPU the simplest. The search is
deterministic, and computes closed forms only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.engines.roles import Use
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.ops.planner import on_gpus
from xray_runtime.ops.planner.memory import Layout
from xray_runtime.ops.planner.plan import Plan, plan_of
from xray_runtime.ops.planner.splits import MAX_RANKS, groups, shared_rows, splits, trained_layouts
from xray_runtime.ops.planner.workload import Workload

MAX_DEVICES = 65_536
"""Largest number of devices that a plan may be asked for."""


def search(workload: Workload, machine: Machine, accept: Callable[[Plan], object] = lambda plan: None) -> Plan:
    """The preferred plan that fits and is accepted; if none fits, the nearest.

    Args:
        accept: raises ConfigError if a plan cannot run for a reason other than memory.

    Raises:
        ConfigError: plans fit, but none was accepted: the error about the first.
    """
    refused: ConfigError | None = None
    nearest: dict[str, Plan] = {}
    candidates = _cpu_plans if machine.device == "cpu" else on_gpus.plans
    for plan in candidates(workload, machine):
        if not plan.fits:
            before = nearest.get(plan.kind, plan)
            nearest[plan.kind] = min(before, plan, key=lambda p: p.fullest.peak_bytes)
            continue
        try:
            accept(plan)
        except ConfigError as error:
            refused = refused or error
            continue
        return replace(plan, reasons=_reasons(nearest))
    if refused is not None:
        raise refused
    return replace(min(nearest.values(), key=lambda p: p.fullest.peak_bytes), reasons=_reasons(nearest))


def _reasons(nearest: dict[str, Plan]) -> tuple[str, ...]:
    return tuple(
        f"{kind}: needs {p.fullest.peak_bytes / 1e9:.4g} GB a device, {p.machine.usable_bytes / 1e9:.4g} GB are usable"
        for kind, p in nearest.items()
    )


def _cpu_plans(workload: Workload, machine: Machine) -> Iterator[Plan]:
    """All candidates; activations are kept before they are recomputed.

    All models share the devices. As many replicas of trained models are useful as a step has micro-batches; if that
    does not fit, all devices may be used. A replica is whole, or split by tensor, or in pipeline stages as well. Ranks
    share rows only where nothing fits without.
    """
    for shared in (workload, *shared_rows(workload)):
        again = shared.with_options(checkpointing=True)
        for one in [shared, again] if again != shared else [shared]:
            yield from _cpu_layouts(one, machine)


def _cpu_layouts(workload: Workload, machine: Machine) -> Iterator[Plan]:
    generating, trained = Layout(dp=workload.generator_replicas), workload.of_use("trained")

    def plan(layout: Layout) -> Plan:
        layouts: dict[Use, Layout] = {"trained": layout, "frozen": Layout(), "sampled": generating}
        return plan_of(workload, machine, "colocated", layouts)

    if not trained:
        yield plan(Layout())
    tokens = workload.batch_size * workload.sequence_tokens
    useful = min(math.ceil(tokens / workload.micro_batch_tokens), workload.batch_size)
    for tp, pp in splits(trained, machine) if (sp := workload.sequence_parallel) == 1 else [(1, 1)]:
        most = min(groups(machine, tp, []) // (pp * sp), workload.batch_size, MAX_RANKS // (tp * pp * sp))
        # A single replica has the most memory per device and needs the fewest other resources.
        for dp in dict.fromkeys((min(useful, most), most, min(1, most))) if most else ():
            yield from map(plan, trained_layouts(workload, tp, pp, dp))
