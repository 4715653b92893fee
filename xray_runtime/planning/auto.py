"""`runtime.parallel: auto`: the engines of a config chosen by the memory model, for the devices that there are.

Only layouts that Workhorses have. For what is trained the first of these that fits:

    ZeRO 0 to 3         over whole replicas
    tensor parallel     a replica split over 2, 4, 8 devices of one node, ZeRO 0 to 2 over replicas
    and pipeline        in 2, 4, 8 stages, each on one device or split again

The last two are for what ZeRO-3 cannot do: it shards over no more ranks than a step has rows, and each holds all
activations of its pass. What is frozen is cut only as far as one copy needs it, the generator by tensor alone.
Placements:

    colocated   one rank a model, all models sharing the devices; on CPU as many ranks as are of use
    separate    devices of its own for each frozen model and the generator; the trained ones share out the rest

As many replicas are of use as a step has micro-batches; where that does not fit, all devices may be taken. One layout
serves every trained model, so each quantity is taken where it is largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from xray_runtime.config.base import FreshBase, PretrainedBase
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import validate
from xray_runtime.config.validation import ConfigError
from xray_runtime.planning.memory import Layout
from xray_runtime.planning.plan import Group, Placement, Plan, RolePlan
from xray_runtime.planning.workload import Machine, Role, Workload, from_config, trained_so

MAX_RANKS = 1024
CUTS = (1, 2, 4, 8)
"""Tensor-parallel degrees and numbers of pipeline stages."""
GENERATOR_SHARE = 0.9
"""Of a GPU that vLLM has to itself."""


def choose_layouts(config: LifecycleConfig, machine: Machine) -> tuple[LifecycleConfig, Plan]:
    """`config` with every engine chosen for `machine` and nothing left to choose; and the plan behind it.

    Raises:
        ConfigError: nothing fits, or the base model cannot be planned.
    """
    plan = choose(_workload(config, machine.device), machine, config.base)
    return _apply(config, plan), plan


def choose(workload: Workload, machine: Machine, base: FreshBase | PretrainedBase) -> Plan:
    """The first plan that fits; `base` is the model that all roles are made of. Raises ConfigError where none does."""
    tried: list[Plan] = []
    for plan in _plans(workload, machine, base):
        if plan.fits:
            return plan
        tried.append(plan)
    nearest = min(tried, key=lambda plan: plan.fullest.peak_bytes)
    raise ConfigError(
        f'runtime.parallel: "auto" is not allowed: nothing fits; nearest is {_words(nearest)} (`xray plan` says what '
        "would fit)"
    )


def engine_of(plan: Plan) -> dict[str, Any]:
    """The fields of `EngineConfig` that the plan's trained models get."""
    layout = _layout(plan, "train")
    return {
        "num_workhorses": layout.num_devices,
        "zero_stage": layout.zero_stage,
        "tensor_parallel": layout.tp,
        "pipeline_parallel": layout.pp,
    }


def describe(plan: Plan) -> str:
    """The choice in one line."""
    return f"runtime.parallel: auto takes {_words(plan)}"


def _words(plan: Plan) -> str:
    engine, machine = engine_of(plan), plan.machine
    others = {"frozen ones": _layout(plan, "score"), "the generator": _layout(plan, "generate")}
    cut = "".join(f"; {name} on {o.num_devices}{_degrees(o)}" for name, o in others.items() if o.num_devices > 1)
    return (
        f"{plan.placement}, trained models on {engine['num_workhorses']} Workhorses under ZeRO-{engine['zero_stage']}"
        f"{_degrees(_layout(plan, 'train'))}{cut}: "
        f"{plan.fullest.peak_bytes / 1e9:.3g} GB on the fullest of {machine.num_devices} {machine.device} devices with "
        f"{machine.usable_bytes / 1e9:.3g} usable GB"
    )


def _degrees(layout: Layout) -> str:
    return "".join(f", {name} {degree}" for name, degree in (("TP", layout.tp), ("PP", layout.pp)) if degree > 1)


def _layout(plan: Plan, use: str) -> Layout:
    """That of the roles with this use, which share one."""
    return next((p.layout for p in plan.roles if p.role.use == use), Layout())


def _workload(config: LifecycleConfig, device: str) -> Workload:
    """The PPO stages' models under the largest passes and the smallest steps of any stage."""
    try:
        workload = from_config(config, device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    batches = [config.sft.batch_size, config.reward.batch_size, workload.batch_size]
    micro_batches = [config.sft.engine.micro_batch_tokens, config.reward.engine.micro_batch_tokens]
    response = max(workload.response_tokens, config.sft.max_response_tokens)
    # Any trained model may be any stage's: what not all of them save, none does here.
    sections = [(section.lora, section.engine) for section in config.trained.values()]
    sections += [(stage.lora, stage.critic_engine) for stage in config.ppo.stages if stage.critic_engine is not None]
    weight_bytes, options = trained_so(sections, device)
    roles = [
        replace(role, weight_bytes=max(weight_bytes, role.weight_bytes), options=options)
        if role.use == "train"
        else role
        for role in workload.roles
    ]
    return replace(
        workload,
        roles=tuple(roles),
        batch_size=min(batches),
        micro_batch_tokens=max(*micro_batches, workload.micro_batch_tokens),
        response_tokens=response,
        sequence_tokens=config.data.max_prompt_tokens + response,
    )


def _plans(workload: Workload, machine: Machine, base: FreshBase | PretrainedBase) -> Iterator[Plan]:
    trained = [role for role in workload.roles if role.use == "train"]
    scored = [role for role in workload.roles if role.use == "score"]
    generators = [role for role in workload.roles if role.use == "generate"]
    tokens = workload.batch_size * workload.sequence_tokens
    useful = min(math.ceil(tokens / workload.micro_batch_tokens), workload.batch_size)
    models = len(workload.roles)
    least = max(role.options.least_zero_stage for role in trained)

    def plan(placement: Placement, shared_by: int, train: Layout, score: Layout, generate: Layout) -> Plan:
        laid_out = [(trained, train), (scored, score), (generators, generate)]
        plans = [RolePlan(r, layout, workload.memory(r, layout), 0) for roles, layout in laid_out for r in roles]
        plans.sort(key=lambda p: p.memory.total, reverse=True)
        # Who shares a device with whom is Ray's choice: the largest may meet.
        groups = [Group(tuple(plans[i : i + shared_by]), range(1), False) for i in range(0, len(plans), shared_by)]
        return Plan(placement, tuple(groups), machine, ())

    def least_cut(roles: list[Role], *, by_layers: bool) -> Layout:
        """The first that every one of `roles` fits under, alone on its devices; where none does, no cut."""
        for tp, pp in _cuts(roles[0], machine, base) if roles else ():
            layout = Layout(tp=tp, pp=pp)
            if (by_layers or pp == 1) and all(
                workload.memory(role, layout).total <= machine.usable_bytes for role in roles
            ):
                return layout
        return Layout()

    on_cpu = machine.device == "cpu"
    if not on_cpu and (useful == 1 or machine.num_devices < models):
        whole = Layout()
        yield plan("colocated", math.ceil(models / machine.num_devices), Layout(zero_stage=least), whole, whole)
    score, generate = Layout(), Layout()
    if not on_cpu:
        score, generate = least_cut(scored, by_layers=True), least_cut(generators, by_layers=False)
    for tp, pp in _cuts(trained[0], machine, base):
        alone = [score.tp] * score.pp * len(scored) + [generate.tp] * len(generators)
        replicas = _groups(machine, tp, [] if on_cpu else alone) // (1 if on_cpu else len(trained)) // pp
        most = min(replicas, workload.batch_size, MAX_RANKS // (tp * pp))
        for dp in sorted({min(useful, most), most}) if most else ():
            for stage in _zero_stages(least, dp, cut=tp * pp > 1):
                layout = Layout(zero_stage=stage, tp=tp, pp=pp, dp=dp)
                placement: Placement = "colocated" if on_cpu else "separate"
                yield plan(placement, models if on_cpu else 1, layout, score, generate)


def _cuts(role: Role, machine: Machine, base: FreshBase | PretrainedBase) -> Iterator[tuple[int, int]]:
    """(tensor-parallel degree, pipeline stages) of a replica, least communication first; whole ones first of all."""
    yield 1, 1
    # A frozen trunk is computed once a rollout, in one piece; adapters and what lies on disk go with ZeRO alone.
    if role.top_layers is not None or role.options.lora_rank is not None or role.options.least_zero_stage == 3:
        return
    shape, node = role.shape, machine.devices_per_node or machine.num_devices
    by_tensor, by_layers = True, True
    if isinstance(base, PretrainedBase):
        # Only now: it takes seconds of imports, and what is small enough for one device never asks.
        from xray_runtime.engines.engine import can_be_cut

        by_tensor, by_layers = can_be_cut(base.model)
    heads = math.gcd(shape.num_heads, shape.num_kv_heads)
    tensor = [tp for tp in CUTS if tp == 1 or (by_tensor and heads % tp == 0 and tp <= node)]
    stages = [pp for pp in CUTS if pp == 1 or (by_layers and pp <= shape.num_layers)]
    yield from ((tp, pp) for pp in stages for tp in tensor if tp * pp > 1)


def _groups(machine: Machine, tp: int, others: list[int]) -> int:
    """How many times `tp` devices of one node are left when others have taken theirs: so many of one node each."""
    node = machine.devices_per_node or machine.num_devices
    free = [node] * (machine.num_devices // node) + [machine.num_devices % node]
    for size in sorted(others, reverse=True):
        # Where the fewest groups are lost, and there on the fullest node.
        open_to = [i for i, left in enumerate(free) if left >= size]
        if not open_to:
            return 0
        free[min(open_to, key=lambda i: (free[i] // tp - (free[i] - size) // tp, free[i]))] -= size
    return sum(left // tp for left in free)


def _zero_stages(least: int, dp: int, *, cut: bool) -> range:
    if dp == 1:
        return range(least, least + 1)
    return range(least, 3 if cut else 4)


def _apply(config: LifecycleConfig, plan: Plan) -> LifecycleConfig:
    generator = next(p for p in plan.roles if p.role.use == "generate")
    score = _layout(plan, "score")
    data: dict[str, Any] = config.model_dump(mode="json")
    data["frozen"] = {"num_workhorses": score.num_devices, "tensor_parallel": score.tp, "pipeline_parallel": score.pp}
    data["generator"]["tensor_parallel"] = generator.layout.tp
    for section in (data["sft"], data["reward"], *data["ppo"]["stages"]):
        for engine in (section["engine"], section.get("critic_engine")):
            if engine is not None:
                engine |= engine_of(plan)
    data["runtime"]["parallel"] = "as_written"
    if plan.machine.device == "cuda":
        share = max(len(group.roles) for group in plan.groups)
        memory = plan.machine.memory_bytes
        data["runtime"]["gpus_per_workhorse"] = 1.0 if share == 1 else math.floor(1000 / share) / 1000
        data["runtime"]["gpu_memory_fraction"] = (
            GENERATOR_SHARE if share == 1 else math.ceil(100 * generator.memory.total / memory) / 100
        )
    return validate(data)
