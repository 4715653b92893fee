"""`runtime.parallel: auto`: the engines of a config chosen by the memory model, for the devices that there are.

Only layouts that Workhorses have: ZeRO over data-parallel ranks for what is trained, one Workhorse for the others.
The first of these that fits, and within it the lowest ZeRO stage:

    colocated   one rank a model, all models sharing the devices; on CPU as many ranks as are of use
    separate    a GPU for each frozen model and the generator; the trained ones share out the rest

As many ranks are of use as a step has micro-batches; where that does not fit, all devices may be taken. One layout
serves every trained model, so each quantity is taken where it is largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from xray_runtime.config import LifecycleConfig
from xray_runtime.config_io import ConfigError, validate
from xray_runtime.planning.memory import Layout
from xray_runtime.planning.plan import Group, Placement, Plan, RolePlan
from xray_runtime.planning.workload import Machine, Workload, from_config

MAX_RANKS = 1024
GENERATOR_SHARE = 0.9
"""Of a GPU that vLLM has to itself."""


def settle(config: LifecycleConfig, machine: Machine) -> tuple[LifecycleConfig, Plan]:
    """`config` with every engine chosen for `machine` and nothing left to choose; and the plan behind it.

    Raises:
        ConfigError: nothing fits, or the base model cannot be planned.
    """
    plan = choose(_workload(config, machine.device), machine)
    return _apply(config, plan), plan


def choose(workload: Workload, machine: Machine) -> Plan:
    """The first plan that fits. Raises ConfigError where none does."""
    tried: list[Plan] = []
    for plan in _plans(workload, machine):
        if plan.fits:
            return plan
        tried.append(plan)
    nearest = min(tried, key=lambda plan: plan.fullest.peak_bytes)
    raise ConfigError(
        f'runtime.parallel: "auto" is not allowed: nothing fits; nearest is {_words(nearest)} (`xray plan` says what '
        "would fit)"
    )


def engine_of(plan: Plan) -> dict[str, int]:
    """The fields of `EngineConfig` that the plan's trained models get."""
    layout = next(p.layout for p in plan.roles if p.role.use == "train")
    return {"num_workhorses": layout.dp, "zero_stage": layout.zero_stage}


def describe(plan: Plan) -> str:
    """The choice in one line."""
    return f"runtime.parallel: auto takes {_words(plan)}"


def _words(plan: Plan) -> str:
    engine, machine = engine_of(plan), plan.machine
    return (
        f"{plan.placement}, trained models on {engine['num_workhorses']} Workhorses under ZeRO-{engine['zero_stage']}: "
        f"{plan.fullest.peak_bytes / 1e9:.3g} GB on the fullest of {machine.num_devices} {machine.device} devices with "
        f"{machine.usable_bytes / 1e9:.3g} usable GB"
    )


def _workload(config: LifecycleConfig, device: str) -> Workload:
    """The PPO stages' models under the largest passes and the smallest steps of any stage."""
    try:
        workload = from_config(config, device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    batches = [config.sft.batch_size, config.reward.batch_size, workload.batch_size]
    micro_batches = [config.sft.engine.micro_batch_tokens, config.reward.engine.micro_batch_tokens]
    response = max(workload.response_tokens, config.sft.max_response_tokens)
    return replace(
        workload,
        batch_size=min(batches),
        micro_batch_tokens=max(*micro_batches, workload.micro_batch_tokens),
        response_tokens=response,
        sequence_tokens=config.data.max_prompt_tokens + response,
    )


def _plans(workload: Workload, machine: Machine) -> Iterator[Plan]:
    trained = [role for role in workload.roles if role.use == "train"]
    others = [role for role in workload.roles if role.use != "train"]
    tokens = workload.batch_size * workload.sequence_tokens
    useful = min(math.ceil(tokens / workload.micro_batch_tokens), workload.batch_size)
    ranks_at_most = min(workload.batch_size, MAX_RANKS)

    def plan(placement: Placement, ranks: int, stage: int, shared_by: int) -> Plan:
        # Tensor- and pipeline-parallel degrees would be chosen here, beside the ZeRO stage.
        layout = Layout(zero_stage=stage, dp=ranks)
        plans = [RolePlan(role, layout, workload.memory(role, layout), 0) for role in trained]
        plans += [RolePlan(role, Layout(), workload.memory(role, Layout()), 0) for role in others]
        plans.sort(key=lambda p: p.memory.total, reverse=True)
        # Who shares a device with whom is Ray's choice: the largest may meet.
        groups = [Group(tuple(plans[i : i + shared_by]), range(1), False) for i in range(0, len(plans), shared_by)]
        return Plan(placement, tuple(groups), machine, ())

    def stages(ranks: int) -> range:
        return range(4 if ranks > 1 else 1)

    devices, models = machine.num_devices, len(workload.roles)
    if machine.device == "cpu":
        for ranks in sorted({min(useful, devices), min(ranks_at_most, devices)}):
            yield from (plan("colocated", ranks, stage, models) for stage in stages(ranks))
        return
    rest = (devices - len(others)) // len(trained)
    if useful == 1 or rest < 1:
        yield plan("colocated", 1, 0, math.ceil(models / devices))
    if rest >= 1:
        for ranks in sorted({min(useful, rest), min(ranks_at_most, rest)}):
            yield from (plan("separate", ranks, stage, 1) for stage in stages(ranks))


def _apply(config: LifecycleConfig, plan: Plan) -> LifecycleConfig:
    generator = next(p for p in plan.roles if p.role.use == "generate")
    data: dict[str, Any] = config.model_dump(mode="json")
    for section in (data["sft"], data["reward"], *data["ppo"]["stages"]):
        section["engine"] |= engine_of(plan)
    data["runtime"]["parallel"] = "as_written"
    if plan.machine.device == "cuda":
        share = max(len(group.roles) for group in plan.groups)
        memory = plan.machine.memory_bytes
        data["runtime"]["gpus_per_workhorse"] = 1.0 if share == 1 else math.floor(1000 / share) / 1000
        data["runtime"]["gpu_memory_fraction"] = (
            GENERATOR_SHARE if share == 1 else math.ceil(100 * generator.memory.total / memory) / 100
        )
    return validate(data)
