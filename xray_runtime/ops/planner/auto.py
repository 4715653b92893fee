"""`runtime.parallel: auto`: the planner chooses the layouts of a stage's models for the available devices.

`xray plan` uses the same functions, so it shows what `auto` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.pool.demand import Resources, check_call
from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.engines.layouts import TRAINERS, EngineConfig
from xray_runtime.engines.roles import CHOSEN, models_of
from xray_runtime.engines.trainer import trainer
from xray_runtime.kernel.config.paths import section
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.plugs import able, unsupported
from xray_runtime.ops.planner.memory import Layout, Options
from xray_runtime.ops.planner.plan import Plan
from xray_runtime.ops.planner.search import search
from xray_runtime.ops.planner.stage_workload import stage_workload
from xray_runtime.ops.planner.workload import Workload, from_parameters

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.graph import Graph, StageCall

GENERATOR_SHARE = 0.9
"""Memory fraction of a GPU that vLLM does not share."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes to a graph that `xray plan` takes as options and suggests; None and False keep the graph's value."""

    lora_rank: int | None = None
    offload: bool = False
    """Optimizer states in host memory."""
    micro_batch_tokens: int | None = None
    row_tokens: int | None = None
    """Tokens of the longest sequence."""

    def of_call(self, call: StageCall) -> StageCall:
        """`call` with these changes to every trained model, and without layouts. Raises ConfigError."""
        data: dict[str, Any] = call.config.model_dump(mode="json")
        for role in models_of(call).values():
            layout = section(data, role.field)
            for field in CHOSEN:
                layout.pop(field, None)
            if role.use != "trained":
                continue
            assert isinstance(role.layout, EngineConfig)
            library = role.layout.library
            if role.layout.capabilities.sharding is None:
                # The planner does not know this trainer, so it plans for the one that is known.
                library, kept = EngineConfig.default, layout.keys() & EngineConfig.model_fields.keys()
                for field in layout.keys() - kept:
                    del layout[field]
            if self.offload and not trainer(library).capabilities.offload:
                where = f"{call.name}.{role.field}.library = {library!r}"
                raise ConfigError(unsupported("--offload", where, able(TRAINERS, "offload")))
            layout |= {"library": library, **trainer(library).planned(None, offload=self.offload)}
            if self.micro_batch_tokens is not None:
                layout["micro_batch_tokens"] = self.micro_batch_tokens
            if self.lora_rank is not None:
                section(data, role.field.rpartition(".")[0])["lora"] = {"rank": self.lora_rank}
        runtime = call.runtime.model_copy(update={"parallel": "auto"})
        return replace(call, config=call.kind.validated(data, where=call.name), runtime=runtime)

    def of_parameters(self, count: float, sequence_tokens: int) -> Workload:
        """The models of PPO with `count` parameters each, with these changes."""
        options = Options(lora_rank=self.lora_rank, offload=self.offload, least_zero_stage=int(self.offload))
        workload = from_parameters(count, min(sequence_tokens, self.row_tokens or sequence_tokens), options)
        if self.micro_batch_tokens is None:
            return workload
        others = workload.open_choices - {"micro_batch_tokens"}
        return replace(workload, micro_batch_tokens=self.micro_batch_tokens, open_choices=others)


UNCHANGED = Changes()


@dataclass(frozen=True)
class GraphPlan:
    """Stage → its plan, for every stage that has models."""

    stages: Mapping[str, Plan]

    @property
    def fits(self) -> bool:
        return all(plan.fits for plan in self.stages.values())

    @property
    def fullest(self) -> str:
        """The stage that needs the most memory on one device."""
        return max(self.stages, key=lambda name: self.stages[name].fullest.peak_bytes)


def plan(
    graph: Graph, machine: Machine, changes: Changes = UNCHANGED, nodes: Sequence[Resources] | None = None
) -> GraphPlan:
    """Plan each stage of `graph` from its models; ignores the layouts in the graph.

    Args:
        nodes: resources of the cluster's nodes; None: not checked.

    Raises:
        ConfigError: the graph has no models, a model cannot be planned, a change is not allowed, or the config or the
            nodes reject every plan that fits.
    """
    calls = [changes.of_call(call) for call in graph.calls.values()]
    plans = ((call.name, plan_call(call, machine, nodes, changes.row_tokens)) for call in calls)
    stages = {name: planned for name, planned in plans if planned is not None}
    if not stages:
        raise ConfigError("this graph cannot be planned: no stage has models")
    trains = any(plan.workload.of_use("trained") for plan in stages.values())
    if not trains and changes != UNCHANGED:
        raise ConfigError("LoRA, offload and micro-batches are not allowed: no stage trains a model")
    return GraphPlan(stages)


def plan_call(
    call: StageCall, machine: Machine, nodes: Sequence[Resources] | None = None, row_tokens: int | None = None
) -> Plan | None:
    """The preferred plan of a stage that fits and that its config and `nodes` accept, or else the nearest; None if the
    stage has no models. No sequence is longer than `row_tokens`. Raises ConfigError like `plan`."""
    workload = stage_workload(call, machine.device)
    if workload is not None and row_tokens is not None:
        tokens, reply = min(workload.sequence_tokens, row_tokens), min(workload.response_tokens, row_tokens)
        workload = replace(workload, sequence_tokens=tokens, response_tokens=reply)

    def accept(candidate: Plan) -> None:
        check_call(with_layouts(call, candidate), machine.device, nodes)

    return search(workload, machine, accept) if workload is not None else None


def choose_layouts(
    call: StageCall, machine: Machine, nodes: Sequence[Resources] | None = None
) -> tuple[StageCall, str | None]:
    """(`call` with every layout chosen for `machine`, one line about the choice, or None without models).

    Raises:
        ConfigError: no plan fits, every plan that fits is rejected, or a model cannot be planned.
    """
    planned = plan_call(call, machine, nodes)
    if planned is None:
        return call, None
    _check_fits(planned, f"{call.name}: ")
    return with_layouts(call, planned), f"{call.name}: runtime.parallel: auto chooses {_described(planned)}"


def choose(workload: Workload, machine: Machine) -> Plan:
    """The preferred plan that fits. Raises ConfigError if none does."""
    planned = search(workload, machine)
    _check_fits(planned)
    return planned


def engine_of(plan: Plan, library: str) -> dict[str, Any]:
    """The plan's `EngineConfig` fields for models that the trainer `library` trains."""
    layout, offload = plan.layouts["trained"], "offload" in plan.workload.open_choices and plan.offloads
    engine = {"library": library, **_layout_fields(layout)}
    if trainer(library).capabilities.expert_parallel:
        engine["expert_parallel"] = layout.ep
    engine |= trainer(library).planned(layout.zero_stage, offload=offload)
    engine |= {"activation_checkpointing": True} if plan.recomputes else {}
    if "micro_batch_tokens" in plan.workload.open_choices:
        engine["micro_batch_tokens"] = plan.workload.micro_batch_tokens
    return engine


def with_layouts(call: StageCall, plan: Plan) -> StageCall:
    """`call` with the plan's layouts in its config. Raises ConfigError if the config does not allow them."""
    data: dict[str, Any] = call.config.model_dump(mode="json")
    frozen = plan.layouts["frozen"]
    for role in models_of(call).values():
        chosen: dict[str, Any] = {"tensor_parallel": plan.layouts["sampled"].tp}
        if role.use == "trained":
            assert isinstance(role.layout, EngineConfig)
            chosen = engine_of(plan, role.layout.library)
        elif role.use == "frozen":
            # The layout of a user's kind may have no ZeRO.
            chosen = _layout_fields(frozen) | ({"zero_stage": frozen.zero_stage} if frozen.zero_stage else {})
        section(data, role.field).update(chosen)
    runtime: dict[str, Any] = {"parallel": "as_written"}
    if plan.machine.device == "cuda":
        share = max(len(group.ranks) for group in plan.groups)
        runtime["gpus_per_workhorse"] = 1.0 if share == 1 else math.floor(1000 / share) / 1000
        # Its memory while it samples: more would become KV cache that is not planned.
        generators = [p.memory.working for p in plan.roles if p.role.use == "sampled"]
        if generators:
            needed = math.ceil(100 * max(generators) / plan.machine.memory_bytes) / 100
            runtime |= {
                "gpu_memory_fraction": GENERATOR_SHARE if share == 1 else needed,
                "generator_replicas": plan.layouts["sampled"].dp,
                "max_num_seqs": plan.workload.running_sequences(plan.layouts["sampled"]),
                "generator_sleeps": plan.workload.generator_sleeps,
                "trainer_sleeps": plan.workload.trainer_sleeps,
            }
    config = call.kind.validated(data, where=call.name)
    return replace(call, config=config, runtime=call.runtime.model_copy(update=runtime))


def _layout_fields(layout: Layout) -> dict[str, Any]:
    """The fields of `LayoutConfig`."""
    degrees = {"tensor_parallel": layout.tp, "pipeline_parallel": layout.pp, "sequence_parallel": layout.sp}
    return {"num_workhorses": layout.num_devices, **degrees}


def _check_fits(plan: Plan, where: str = "") -> None:
    if not plan.fits:
        raise ConfigError(
            f'{where}runtime.parallel: "auto" is not allowed: no plan fits; the nearest is {_described(plan)} (run '
            "`xray plan` for changes that would fit)"
        )


def _described(plan: Plan) -> str:
    machine, models = plan.machine, "; ".join(f"{p.role.name} {p.layout_text}" for p in plan.roles)
    return (
        f"{plan.placement} ({models}): {plan.fullest.peak_bytes / 1e9:.3g} GB on the fullest of {machine.num_devices} "
        f"{machine.device} devices with {machine.usable_bytes / 1e9:.3g} usable GB"
    )
