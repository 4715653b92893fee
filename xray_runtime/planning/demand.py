"""What a lifecycle asks of a cluster, and the refusal of one that asks for more than there is.

Only what is absent is refused: devices that others hold at the moment are waited for (`actors/placement.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xray_runtime.config.base import FreshBase
from xray_runtime.config.engines import GeneratorConfig, LayoutConfig
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.preferences import GoldPreferences
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError

Resources = Mapping[str, float]
"""Ray's names of resources ("CPU", "GPU") → amount."""


@dataclass(frozen=True)
class Demand:
    """One model's Workhorses: `num_ranks` of them, `cpus` and `gpus` each."""

    role: str
    num_ranks: int
    cpus: float
    gpus: float
    together: int = 1
    """So many ranks in a row are one tensor-parallel group, which belongs on one node."""
    num_replicas: int = 1
    """So many whole copies the ranks are."""

    def each(self, ranks: int = 1) -> dict[str, float]:
        """What `ranks` of its Workhorses reserve."""
        both = {"CPU": self.cpus * ranks, "GPU": self.gpus * ranks}
        return {name: amount for name, amount in both.items() if amount > 0}

    def grouped(self) -> bool:
        """Whether its Workhorses come to a placement group; single ones on CPU come from the stable."""
        return self.gpus > 0 or self.num_ranks > self.num_replicas


def demand(role: str, layout: LayoutConfig | GeneratorConfig, runtime: RuntimeConfig, device: str) -> Demand:
    """What the model of `role` asks for."""
    gpus = runtime.gpus_per_workhorse if device == "cuda" else 0.0
    together = layout.tensor_parallel
    if isinstance(layout, GeneratorConfig):
        replicas = runtime.generator_replicas
        return Demand(role, together * replicas, runtime.cpus_per_workhorse, gpus, together, replicas)
    return Demand(role, layout.num_workhorses, runtime.cpus_per_workhorse, gpus, together)


def stage_demands(config: LifecycleConfig, device: str) -> dict[str, list[Demand]]:
    """Stage → what its models, all alive at the same time, ask for."""

    def of(roles: Mapping[str, LayoutConfig | GeneratorConfig]) -> list[Demand]:
        return [demand(role, layout, config.runtime, device) for role, layout in roles.items()]

    shared_trunk = not isinstance(config.base, FreshBase) and config.base.trainable_layers is not None
    demands = {"sft": of({"policy": config.sft.engine})}
    if isinstance(config.preferences, GoldPreferences):
        demands["preferences"] = of({"generator": config.generator})
    demands["reward"] = of({"reward": config.reward.engine})
    for number, stage in enumerate(config.ppo.stages, start=1):
        roles: dict[str, LayoutConfig | GeneratorConfig] = {
            "generator": config.generator,
            "policy": stage.engine,
            "reward": config.frozen,
        }
        if not shared_trunk:
            roles["reference"] = config.frozen
        if stage.critic == "separate":
            roles["critic"] = stage.critic_engine or stage.engine
        demands[f"ppo-{number}"] = of(roles)
    frozen = dict.fromkeys(("before", "after", "reward"), config.frozen)
    return demands | {"evaluate": of({"generator": config.generator, **frozen})}


def check_config(config: LifecycleConfig, device: str, nodes: Sequence[Resources]) -> None:
    """Raises ConfigError where a stage asks for more than `nodes` have in all, or for what `device` cannot do."""
    if config.runtime.generator_sleeps and device == "cpu":
        raise ConfigError("runtime.generator_sleeps: true is not allowed on CPU: only vLLM on CUDA gives memory back")
    if config.runtime.trainer_sleeps and device == "cpu":
        raise ConfigError("runtime.trainer_sleeps: true is not allowed on CPU: only GPU memory can be given away")
    for name, engine in config.engines.items():
        if device == "cpu" and engine.cuda_only:
            raise ConfigError(f"{name}.{engine.cuda_only} is not allowed on CPU: Megatron-core runs it on CUDA alone")
        if engine.offload == "nvme" and device != "cuda":
            raise ConfigError(
                f'{name}.offload: "nvme" is not allowed: it needs CUDA, and models are on the CPU here: "cpu" or "none"'
            )
    for stage, demands in stage_demands(config, device).items():
        check(stage, demands, nodes)


def check(what: str, demands: Sequence[Demand], nodes: Sequence[Resources]) -> None:
    """Raises ConfigError where `what` asks for more than `nodes` have in all, or a Workhorse for more than one has."""
    for name, field in (("CPU", "runtime.cpus_per_workhorse"), ("GPU", "runtime.gpus_per_workhorse")):
        asked = {d.role: (d.num_ranks, d.each().get(name, 0.0)) for d in demands}
        total, has = sum(ranks * each for ranks, each in asked.values()), sum(node.get(name, 0.0) for node in nodes)
        roles = ", ".join(f"{role} {ranks} × {each:g}" for role, (ranks, each) in asked.items() if each)
        # Ray counts in ten-thousandths.
        if total > has + 1e-4:
            raise ConfigError(
                f"{what}: its models ask for {total:g} {name}s ({roles}) and the cluster has {has:g}: lower {field} "
                "or engine.num_workhorses, or give it more"
            )
        most = max((each for _, each in asked.values()), default=0.0)
        largest = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if most > largest + 1e-4:
            raise ConfigError(
                f"{what}: one Workhorse asks for {most:g} {name}s and the largest node has {largest:g}: lower {field}"
            )
