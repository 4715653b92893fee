"""The planner of a stage, for `xray plan` and `auto`: the first candidate that fits and is accepted.

Candidates come in order of preference: on GPUs the fastest by the cost model first, on CPU the simplest. The search is
deterministic, and computes closed forms only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xray_runtime.config.validation import ConfigError
from xray_runtime.planning import on_cpu, on_gpus
from xray_runtime.planning.plan import Plan
from xray_runtime.planning.workload import Machine, Workload

MAX_DEVICES = 65_536
"""Largest number of devices that a plan may be asked for."""


def search(
    workload: Workload,
    machine: Machine,
    accept: Callable[[Plan], object] = lambda plan: None,
) -> Plan:
    """The preferred plan that fits and is accepted; if none fits, the nearest.

    Args:
        accept: raises ConfigError if a plan cannot run for a reason other than memory.

    Raises:
        ConfigError: plans fit, but none was accepted: the error about the first.
    """
    refused: ConfigError | None = None
    nearest: dict[str, Plan] = {}
    candidates = on_cpu.plans if machine.device == "cpu" else on_gpus.plans
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
