"""The contents of the models of a `ppo` stage. `roles` says which there are, and their layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import BranchSpec, ModelSpec, scored_together
from xray_runtime.kernel.config.sources import is_function
from xray_runtime.kernel.graph.artifacts import VALUE_HEAD
from xray_runtime.methods.common.training.dataset import check_longest
from xray_runtime.methods.common.training.trained_model import trained_model
from xray_runtime.methods.ppo.adapter_sync import synced_adapter
from xray_runtime.methods.ppo.objectives import CriticObjective, PPOObjective
from xray_runtime.methods.ppo.roles import ppo_models
from xray_runtime.models.continued import continues
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.objectives import ReferenceObjective
from xray_runtime.rewards.reward_sources import RewardSources

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.methods.common.training.prompts import UniquePrompts
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.methods.ppo.functions import Functions
    from xray_runtime.methods.ppo.kind import PPOInputs
    from xray_runtime.methods.ppo.teachers import Teachers

Specs = dict[str, ModelSpec | GeneratorSpec]


def model_specs(
    stage: Stage[PPOConfig, PPOInputs],
    rewards: RewardSources,
    functions: Functions,
    max_prompt: int,
    teachers: Teachers | None = None,
) -> Specs:
    """Role → what to open; prompts have at most `max_prompt` tokens."""
    config, policy = stage.config, stage.inputs.policy.path
    reference = stage.inputs.reference.path if stage.inputs.reference is not None else policy
    trained_at_once = (2 if config.critic_in_use == "separate" else 1) + bool(config.lag)
    shared_critic, critic = config.critic_in_use == "shared", policy / "critic"
    specs: Specs = {}
    for name, role in ppo_models(config).items():
        if name == "generator":
            longest = max_prompt + config.max_response_tokens
            adapter = stage_adapter(stage)
            specs[name] = GeneratorSpec(policy, longest, config.generator, adapter=adapter)
        elif name == "champion":
            assert stage.inputs.champion is not None
            specs[name] = GeneratorSpec(
                stage.inputs.champion.path, max_prompt + config.max_response_tokens, config.generator
            )
        elif name == "policy":
            specs[name] = trained_model(
                stage,
                policy,
                PPOObjective(config, functions.loss if is_function(config.loss) else None),
                role=name,
                training_at_once=trained_at_once,
                new_head=shared_critic,
                head=policy / VALUE_HEAD if shared_critic and (policy / VALUE_HEAD).exists() else None,
                # Models with the policy's frozen trunk are branches of the policy.
                branches=rewards.branches | ({"reference": BranchSpec(reference)} if role.branches else {}),
                reference=ReferenceObjective(config.temperature) if is_own_reference(stage) else None,
                continues=goes_on(stage),
            )
        elif name == "reference" and not is_own_reference(stage):
            specs[name] = ModelSpec(reference, ReferenceObjective(config.temperature), frozen=config.frozen)
        elif name == "critic":
            specs[name] = trained_model(
                stage,
                critic if critic.exists() else reference,
                CriticObjective(config),
                role=name,
                training_at_once=trained_at_once,
                training=config.model_copy(update={"engine": role.layout, "lora": _merged(config.lora)}),
                new_head=True,
                head=critic / VALUE_HEAD if critic.exists() else None,
                continues=False,
            )
    # With a lag, the generator works at the same time.
    scored = {role: spec for role, spec in specs.items() if isinstance(spec, ModelSpec)} | rewards.specs()
    scored |= {} if teachers is None else teachers.specs()
    return specs | scored_together(scored, beside=int(bool(config.lag)))


def check_rows(stage: Stage[PPOConfig, PPOInputs], specs: Specs, prompts: UniquePrompts) -> None:
    """Raises ValueError if a Workhorse of a trained model cannot hold the longest prompt with the longest reply."""
    reply = stage.config.max_response_tokens
    for name, field in (("policy", "engine"), ("critic", "critic_engine" if stage.config.critic_engine else "engine")):
        if isinstance(spec := specs.get(name), ModelSpec):
            check_longest(stage, spec, prompts.lengths, prompts.id, reply_tokens=reply, field=field)


def _merged(lora: LoRAConfig | None) -> LoRAConfig | None:
    """The adapters of a critic: no checkpoint of its own, it has its weights beside it."""
    return None if lora is None else lora.model_copy(update={"publish": "merged"})


def goes_on(stage: Stage[PPOConfig, PPOInputs]) -> bool:
    """Whether the policy's adapters are those that it is given. A generator with adapters of its own has the given
    weights below them, and so wants new ones."""
    config = stage.config
    if config.lora is None or config.adapter_sync == "adapter":
        return False
    return continues(stage.inputs.policy.path, config.lora, stage.name)


def stage_adapter(stage: Stage[PPOConfig, PPOInputs]) -> LoRAConfig | None:
    """`synced_adapter` of a stage."""
    config, way = stage.config, "merged" if goes_on(stage) else stage.config.adapter_sync
    return synced_adapter(way, config.lora, config.generator, stage.runtime)


def is_own_reference(stage: Stage[PPOConfig, PPOInputs]) -> bool:
    """Whether the reference is the policy with its adapters off."""
    policy, reference = stage.inputs.policy, stage.inputs.reference
    return (
        stage.config.has_reference
        and stage.config.lora is not None
        and (reference is None or reference.path == policy.path)
    )
