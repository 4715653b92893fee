"""The shipped lifecycle as a graph: data → base → SFT → preferences → reward model → PPO stages or DPO → evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.current import current_graph
from xray_runtime.kernel.graph.graph import Graph, recording
from xray_runtime.kernel.graph.handles import Handle, OpenGraph
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.methods.base.kind import BASE
from xray_runtime.methods.benchmark.kind import BENCHMARK
from xray_runtime.methods.dpo.kind import DPO
from xray_runtime.methods.evaluate.config import EvaluateConfig
from xray_runtime.methods.evaluate.kind import EVALUATE
from xray_runtime.methods.fresh_base.kind import FRESH_BASE
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.methods.ppo.kind import PPO
from xray_runtime.methods.preferences.config import DatasetPreferences, GoldPreferences
from xray_runtime.methods.preferences.kind import PREFERENCES
from xray_runtime.methods.prepare.kind import PREPARE
from xray_runtime.methods.reward_base.kind import REWARD_BASE
from xray_runtime.methods.reward_model.config import RewardConfig
from xray_runtime.methods.reward_model.kind import REWARD_MODEL
from xray_runtime.methods.sft.kind import SFT
from xray_runtime.methods.split_preferences.kind import SPLIT_PREFERENCES
from xray_runtime.models.config import FreshBase, PretrainedBase


@dataclass(frozen=True)
class Lifecycle:
    policy: Handle
    evaluation: Handle


def lifecycle_graph(config: LifecycleConfig) -> Lifecycle:
    """Add the stages of `config` to the current graph."""
    layers = None if isinstance(config.base, FreshBase) else config.base.trainable_layers
    trained = {"trainable_layers": layers} if layers is not None else {}

    # Open references first, so that a wrong one fails before anything is computed.
    base_ref = None if isinstance(config.base, FreshBase | PretrainedBase) else config.base.ref
    refs = {"base.ref": base_ref, "reward_ref": config.reward_ref, "evaluate.verdicts": config.evaluate.verdicts}
    # `preferences.path` may be a checkpoint that `xray preferences` published.
    if isinstance(config.preferences, DatasetPreferences) and (Path(config.preferences.path) / MANIFEST).is_file():
        refs["preferences.path"] = config.preferences.path
    named = {field: _checkpoint(current_graph(), field, ref) for field, ref in refs.items() if ref is not None}

    data = PREPARE(name="prepare", **fields_of(config.data))
    if isinstance(config.base, FreshBase):
        base = FRESH_BASE(data, name="base", **fields_of(config.base))
    elif isinstance(config.base, PretrainedBase):
        base = BASE(name="base", generator=config.generator, **fields_of(config.base, "trainable_layers"))
    else:
        base = named["base.ref"]
    start = SFT(base, data, name="sft", **fields_of(config.sft) | trained) if config.sft is not None else base

    judged = named.get("preferences.path")
    pairs = _preferences(config, start, data, judged) if config.preferences is not None else None
    judges: list[object] = [term.model_dump() for term in config.evaluate.judges]
    if pairs is not None and config.evaluate.heldout_reward_model is not None:
        share = {"heldout": config.evaluate.heldout_reward_model}
        judge_pairs = SPLIT_PREFERENCES(pairs, name="judge-pairs", part="heldout", **share)
        pairs = SPLIT_PREFERENCES(pairs, name="training-pairs", part="training", **share)
        learning = fields_of(config.reward or RewardConfig())
        judges.insert(0, REWARD_MODEL(start, judge_pairs, name="judge", **learning | trained))
    rewards: list[object] = [term.model_dump() for term in config.rewards]
    if config.reward is not None:
        rewards.insert(0, REWARD_MODEL(start, pairs, name="reward", **fields_of(config.reward) | trained))
    elif config.reward_ref is not None:
        rewards.insert(0, named["reward_ref"])
    elif config.reward_base is not None:
        fields = fields_of(config.reward_base) | {"frozen": config.frozen}
        rewards.insert(0, REWARD_BASE(data, name="reward_base", **fields))

    policy = start
    policies = {"base" if config.sft is None else "sft": start}
    if config.dpo is not None:
        policy = DPO(start, pairs, name="dpo", **fields_of(config.dpo) | trained)
        policies["dpo"] = policy
    for number, stage in enumerate(config.ppo_stages, start=1):
        fields = fields_of(stage) | trained | scoring_fields(config)
        # Judges choose the best version, not only the reward it was trained on.
        fields |= {"judges": judges} if stage.validation is not None else {}
        policy = PPO(policy, data, reference=start, rewards=rewards, name=f"ppo-{number}", **fields)
        policies[f"ppo-{number}"] = policy
    _benchmarks(config, policies, data)
    # A judge that compares replies needs several per prompt; the evaluation samples one.
    shown = rewards[: len(rewards) - len(config.rewards)]
    shown += [term.model_dump() for term in config.rewards if not term.compares]
    fields = evaluation_fields(config)
    if config.evaluate.verdicts is not None:
        fields["verdicts"] = named["evaluate.verdicts"]
    evaluation = EVALUATE(policy, start, data, rewards=shown, judges=judges, name="evaluate", **fields)
    return Lifecycle(policy, evaluation)


def _benchmarks(config: LifecycleConfig, policies: dict[str, Handle], data: Handle) -> None:
    for name, suite in config.benchmarks.items():
        shared = {f: getattr(config, f) for f in ("generator", "frozen") if f in type(suite).model_fields}
        shared = {field: value for field, value in shared.items() if field not in suite.model_fields_set}
        for stage, policy in policies.items():
            BENCHMARK(policy, data, name=f"{name}-{stage}", **fields_of(suite) | shared)


def _checkpoint(graph: OpenGraph, field: str, ref: str) -> Handle:
    try:
        return graph.checkpoint(ref)
    except ConfigError as error:
        raise ConfigError(f"{field}: {str(error).removeprefix('REF: ')}") from None


def _preferences(config: LifecycleConfig, start: Handle, data: Handle, judged: Handle | None) -> Handle:
    """`judged`: the published human verdicts, if the pairs come from them."""
    source = config.preferences
    assert source is not None
    if isinstance(source, GoldPreferences):
        sampling = {"gold": config.gold, "generator": config.generator}
        return PREFERENCES(policy=start, data=data, name="preferences", **fields_of(source) | sampling)
    if isinstance(source, DatasetPreferences) and judged is not None:
        limits = {"max_pairs": source.max_pairs, "heldout_fraction": source.heldout_fraction}
        return PREFERENCES(data=data, judgements=judged, name="preferences", source="judgements", **limits)
    return PREFERENCES(data=data, name="preferences", **fields_of(source))


def fields_of(section: BaseModel, *others: str) -> dict[str, Any]:
    """The fields of a section as keywords, without `others` and the tag that selects it in YAML."""
    return {name: getattr(section, name) for name in type(section).model_fields if name not in ("kind", *others)}


def scoring_fields(config: LifecycleConfig) -> dict[str, Any]:
    """Fields that every stage shares which generates and scores replies."""
    return {name: getattr(config, name) for name in ("gold", "max_failed", "generator", "frozen")}


def evaluation_fields(config: LifecycleConfig) -> dict[str, Any]:
    """Fields of an evaluation, without its rewards and judges."""
    return {name: getattr(config.evaluate, name) for name in EvaluateConfig.model_fields} | scoring_fields(config)


def record_options(config: LifecycleConfig) -> dict[str, Any]:
    """The options of a `RunRecord` and a `Workspace` that come from `config`."""
    return {
        "project": config.project,
        "seed": config.seed,
        "gates": config.promotion.model_dump(mode="json"),
        "terms": config.terms,
        "record": config.model_dump(mode="json"),
    }


def recorded_graph(config: LifecycleConfig) -> Graph:
    """The graph of `config` for plans: nothing runs, and no checkpoint is opened."""
    with recording(config.seed, config.runtime) as graph:
        lifecycle_graph(config)
    return graph
