"""`runtime.parallel: auto`: the engines of a config as the planner chooses them, for the devices that there are.

`xray plan` asks the same functions, so what it says is what `auto` takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

from xray_runtime.config.base import FreshBase, PretrainedBase
from xray_runtime.config.lifecycle import CHOSEN, LifecycleConfig
from xray_runtime.config.loading import validate
from xray_runtime.config.validation import ConfigError
from xray_runtime.planning.memory import Layout
from xray_runtime.planning.plan import Plan, search
from xray_runtime.planning.workload import Machine, Workload, from_config, plannable_base

GENERATOR_SHARE = 0.9
"""Of a GPU that vLLM has to itself."""

Check = Callable[[LifecycleConfig], object]
"""Raises ConfigError where a config asks for more than there is (`demand.check_config`, of its graph and the nodes)."""


def choose_layouts(
    config: LifecycleConfig, machine: Machine, check: Check = lambda config: None
) -> tuple[LifecycleConfig, Plan]:
    """`config` with every engine chosen for `machine` and nothing left to choose; and the plan behind it.

    Raises:
        ConfigError: nothing fits, or what fits is refused by the config or by `check`, or the base model cannot be
            planned.
    """
    plan = _fitting(plan_config(config, machine, check))
    return with_layouts(config, plan), plan


def plan_config(config: LifecycleConfig, machine: Machine, check: Check = lambda config: None) -> Plan:
    """The first plan that fits, of those which `config` and `check` accept; where none fits, what comes nearest.

    Raises:
        ConfigError: all that fit are refused, or the base model cannot be planned.
    """
    try:
        workload = from_config(config, machine.device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    model = _model(plannable_base(config.base))
    return search(workload, machine, model, lambda plan: check(with_layouts(config, plan)))


def choose(workload: Workload, machine: Machine, base: FreshBase | PretrainedBase) -> Plan:
    """The first plan that fits; `base` is the model that all roles are made of. Raises ConfigError where none does."""
    return _fitting(search(workload, machine, _model(base)))


def engine_of(plan: Plan) -> dict[str, Any]:
    """The fields of `EngineConfig` that the plan's trained models get."""
    layout = plan.layouts["train"]
    engine = {"library": "deepspeed", "zero_stage": layout.zero_stage, **_spread(layout)}
    return engine | ({"activation_checkpointing": True} if plan.recomputes else {})


def describe(plan: Plan) -> str:
    """The choice in one line."""
    return f"runtime.parallel: auto takes {_words(plan)}"


def with_layouts(config: LifecycleConfig, plan: Plan) -> LifecycleConfig:
    """`config` as if the plan's layouts were written in it. Raises ConfigError where it does not allow them."""
    data: dict[str, Any] = config.model_dump(mode="json")
    for path in config.engines:
        section(data, path).update(engine_of(plan))
    score = plan.layouts["score"]
    data["frozen"] |= _spread(score) | {"zero_stage": score.zero_stage}
    data["generator"]["tensor_parallel"] = plan.layouts["generate"].tp
    data["runtime"]["parallel"] = "as_written"
    if plan.machine.device == "cuda":
        share = max(len(group.ranks) for group in plan.groups)
        generator = next(p for p in plan.roles if p.role.use == "generate").memory.total
        data["runtime"]["gpus_per_workhorse"] = 1.0 if share == 1 else math.floor(1000 / share) / 1000
        data["runtime"]["gpu_memory_fraction"] = (
            GENERATOR_SHARE if share == 1 else math.ceil(100 * generator / plan.machine.memory_bytes) / 100
        )
    return validate(data)


def left_open(config: LifecycleConfig) -> dict[str, Any]:
    """The data of `config` with every layout left to `auto`, whatever is written in it."""
    data: dict[str, Any] = config.model_dump(mode="json")
    for path in (*config.engines, "frozen", "generator"):
        for field in CHOSEN:
            section(data, path).pop(field, None)
    data["runtime"]["parallel"] = "auto"
    return data


def section(data: Any, path: str) -> Any:
    """What stands at a dotted path of a config's data."""
    return reduce(lambda node, key: node[int(key) if isinstance(node, list) else key], path.split("."), data)


def _spread(layout: Layout) -> dict[str, Any]:
    """The fields of `LayoutConfig`."""
    return {
        "num_workhorses": layout.num_devices,
        "tensor_parallel": layout.tp,
        "pipeline_parallel": layout.pp,
    }


def _model(base: FreshBase | PretrainedBase) -> str | None:
    return None if isinstance(base, FreshBase) else base.model


def _fitting(plan: Plan) -> Plan:
    if not plan.fits:
        raise ConfigError(
            f'runtime.parallel: "auto" is not allowed: nothing fits; the nearest is {_words(plan)} (see `xray '
            f"plan` for "
            "what would fit)"
        )
    return plan


def _words(plan: Plan) -> str:
    train, machine = plan.layouts["train"], plan.machine
    others = {"frozen ones": plan.layouts["score"], "the generator": plan.layouts["generate"]}
    cut = "".join(
        f"; {name} on {o.num_devices}{', ZeRO-3' if o.zero_stage else ''}{_degrees(o)}"
        for name, o in others.items()
        if o.num_devices > 1
    )
    return (
        f"{plan.placement}, trained models on {train.num_devices} Workhorses under ZeRO-{train.zero_stage}"
        f"{_degrees(train)}{', recomputing' if plan.recomputes else ''}{cut}: "
        f"{plan.fullest.peak_bytes / 1e9:.3g} GB on the fullest of {machine.num_devices} {machine.device} devices with "
        f"{machine.usable_bytes / 1e9:.3g} usable GB"
    )


def _degrees(layout: Layout) -> str:
    return "".join(f", {name} {degree}" for name, degree in (("TP", layout.tp), ("PP", layout.pp)) if degree > 1)
