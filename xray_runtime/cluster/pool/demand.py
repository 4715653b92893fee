"""The resources that a graph's stages need, and the check that a cluster has them.

Only the cluster's total is checked; a stage waits for devices that are in use (`cluster/pool/placement.py`).

Models share GPUs where `runtime.gpus_per_workhorse` is below 1. Ray packs fractions: it would put two ranks of one
model on one GPU, which NCCL refuses, and policy and generator on different ones, which excludes CUDA IPC. So a stage
reserves whole GPUs, and each takes at most one rank of a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xray_runtime.engines.layouts import EngineConfig, GeneratorConfig, LayoutConfig
from xray_runtime.engines.roles import models_of
from xray_runtime.kernel.config.section import RuntimeConfig, sections
from xray_runtime.kernel.config.validation import ConfigError

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.graph import StageCall

ROUNDING = 1e-6
"""A third of a GPU may be written as 0.333."""

Resources = Mapping[str, float]
"""Ray's resource names ("CPU", "GPU") → amount."""


@dataclass(frozen=True)
class Demand:
    """One model's Workhorses: `num_ranks` of them, `cpus` and `gpus` each."""

    role: str
    num_ranks: int
    cpus: float
    gpus: float
    together: int = 1
    """Number of consecutive ranks in a tensor-parallel group, which must be on one node."""
    num_replicas: int = 1
    """Number of whole copies of the model."""

    def each(self, ranks: int = 1) -> dict[str, float]:
        """Resources of `ranks` Workhorses."""
        both = {"CPU": self.cpus * ranks, "GPU": self.gpus * ranks}
        return {name: amount for name, amount in both.items() if amount > 0}

    def grouped(self) -> bool:
        """Whether the Workhorses need a placement group; single ones on CPU come from the worker pool."""
        return self.gpus > 0 or self.num_ranks > self.num_replicas


def demand(role: str, layout: LayoutConfig | GeneratorConfig, runtime: RuntimeConfig, device: str) -> Demand:
    """The demand of one model."""
    gpus = runtime.gpus_per_workhorse if device == "cuda" else 0.0
    together = layout.tensor_parallel
    if isinstance(layout, GeneratorConfig):
        replicas = runtime.generator_replicas
        gpus = 0.0 if layout.capabilities.remote else gpus
        return Demand(role, together * replicas, runtime.cpus_per_workhorse, gpus, together, replicas)
    return Demand(role, layout.num_workhorses, runtime.cpus_per_workhorse, gpus, together)


def shares_gpus(models: Sequence[Demand]) -> bool:
    return any(0.0 < model.gpus < 1.0 for model in models)


def first_gpus(models: Sequence[Demand]) -> tuple[Mapping[str, int], int]:
    """(role → number of its first GPU, number of GPUs), with as few GPUs as possible and their ranks spread evenly.

    A model's ranks are on GPUs with consecutive numbers.
    """
    most = math.floor(1.0 / max(model.gpus for model in models) + ROUNDING)
    widest = max(math.ceil(model.num_ranks / model.together) * model.together for model in models)
    used = [0] * max(widest, -(-sum(model.num_ranks for model in models) // most))
    first: dict[str, int] = {}
    for model in sorted(models, key=lambda m: m.num_ranks, reverse=True):
        size = model.num_ranks
        starts = range(0, len(used) + model.together, model.together)
        free = [start for start in starts if max(used[start : start + size], default=0) < most]
        # New GPUs last, then the emptiest.
        start = min(free, key=lambda s: (max(s + size - len(used), 0), max(used[s : s + size], default=0)))
        used += [0] * (start + size - len(used))
        first[model.role] = start
        for gpu in range(start, start + size):
            used[gpu] += 1
    return first, len(used)


def total(demands: Sequence[Demand]) -> dict[str, float]:
    """Resource → amount that a stage with these models reserves. GPUs that models share are reserved whole."""
    amounts: dict[str, float] = {}
    for model in demands:
        for name, amount in model.each(model.num_ranks).items():
            amounts[name] = amounts.get(name, 0.0) + amount
    return amounts | ({"GPU": float(first_gpus(demands)[1])} if shares_gpus(demands) else {})


def call_demands(call: StageCall, device: str) -> list[Demand]:
    """The demands of a stage's models, which are all open at the same time."""
    return [demand(name, role.layout, call.runtime, device) for name, role in models_of(call).items()]


def check_call(call: StageCall, device: str, nodes: Sequence[Resources] | None) -> None:
    """Raise ConfigError if a stage needs more than all `nodes` have, or something that `device` cannot do.

    Resources are not checked with `parallel: auto`, since layouts are not chosen yet, nor with `nodes` None, where the
    cluster is not known.
    """
    runtime = call.runtime
    if runtime.generator_sleeps and device == "cpu":
        raise ConfigError("runtime.generator_sleeps: true is not allowed on CPU: only GPU memory can be released")
    if runtime.trainer_sleeps and device == "cpu":
        raise ConfigError("runtime.trainer_sleeps: true is not allowed on CPU: only GPU memory can be released")
    on_device = runtime.model_copy(update={"device": device})
    for path, part in sections(call.config):
        try:
            # Again: `parallel: auto` has chosen layouts since the call was recorded, and the device is known.
            part.check_runtime(on_device, path)
            if isinstance(part, EngineConfig):
                part.check_device(device, path)
        except ValueError as error:
            raise ConfigError(f"{call.name}.{error}") from None
    if runtime.parallel != "auto" and nodes is not None:
        check(call.name, call_demands(call, device), nodes)


def check(what: str, demands: Sequence[Demand], nodes: Sequence[Resources]) -> None:
    """Raise ConfigError if `what` needs more than all `nodes` have, or a Workhorse more than the largest node has."""
    for name, field in (("CPU", "runtime.cpus_per_workhorse"), ("GPU", "runtime.gpus_per_workhorse")):
        needs = {d.role: (d.num_ranks, d.each().get(name, 0.0)) for d in demands}
        needed, has = total(demands).get(name, 0.0), sum(node.get(name, 0.0) for node in nodes)
        roles = ", ".join(f"{role} {ranks} × {each:g}" for role, (ranks, each) in needs.items() if each)
        # Ray counts in ten-thousandths.
        if needed > has + 1e-4:
            raise ConfigError(
                f"{what}: its models need {needed:g} {name}s ({roles}) and the cluster has {has:g}: lower {field} "
                "or engine.num_workhorses, or add nodes"
            )
        most = max((each for _, each in needs.values()), default=0.0)
        largest = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if most > largest + 1e-4:
            raise ConfigError(
                f"{what}: one Workhorse needs {most:g} {name}s and the largest node has {largest:g}: lower {field}"
            )
