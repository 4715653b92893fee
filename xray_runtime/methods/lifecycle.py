"""The shipped lifecycle's config: YAML files, `--set` overrides and Prefect's parameter form all validate against it.

Every field states its bounds and says what it means; unknown keys, wrong types, out-of-range values and impossible
combinations are refused before anything is computed. Nothing in this package imports torch, Ray or Prefect, so
a config can be checked anywhere in milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.engines.layouts import EngineConfig, FrozenConfig, GeneratorConfig, LayoutConfig
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.config.section import RuntimeConfig, Section, UnitInterval, sections
from xray_runtime.kernel.config.sources import Gold, SourceTerms
from xray_runtime.methods.benchmark.config import BenchmarkConfig
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.evaluate.config import EvaluateSection, PromotionConfig
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.preferences.config import (
    DatasetPreferences,
    GoldPreferences,
    PreferencesConfig,
)
from xray_runtime.methods.prepare.config import DataConfig
from xray_runtime.methods.reward_model.config import RewardBase, RewardConfig
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.config import BaseConfig, FreshBase, PretrainedBase
from xray_runtime.models.lora import EXPERTS, LINEAR_LAYERS, LoRAConfig
from xray_runtime.rewards.config import ExternalReward


def _check_split(field: str, layout: LayoutConfig, base: FreshBase) -> None:
    _check_heads(field, layout.tensor_parallel, base)
    if base.num_heads % layout.sequence_parallel:
        given = f"{field}.sequence_parallel = {layout.sequence_parallel}"
        raise ValueError(f"{given} must divide base.num_heads = {base.num_heads}")
    stages = layout.pipeline_parallel
    if stages > base.num_layers:
        raise ValueError(f"{field}.pipeline_parallel = {stages} must be at most base.num_layers = {base.num_layers}")


def _check_heads(field: str, tensor: int, base: FreshBase) -> None:
    if base.num_heads % tensor or base.num_kv_heads % tensor:
        raise ValueError(
            f"{field}.tensor_parallel = {tensor} must divide base.num_heads = {base.num_heads} and base.num_kv_heads = "
            f"{base.num_kv_heads}"
        )


def _check_divides(field: str, engine: EngineConfig, base: FreshBase) -> None:
    capabilities = engine.capabilities
    for degree, sizes in (
        ("tensor_parallel", capabilities.tensor_divides),
        ("pipeline_parallel", capabilities.pipeline_divides),
    ):
        for size in sizes:
            if getattr(base, size) % getattr(engine, degree):
                raise ValueError(
                    f"{field}.{degree} = {getattr(engine, degree)} must divide base.{size} = {getattr(base, size)} "
                    f"with library {engine.library!r}"
                )


def _check_adapters(field: str, lora: LoRAConfig, base: FreshBase) -> None:
    # In a mixture the feed-forward layers are experts.
    layers = (*LINEAR_LAYERS[:4], EXPERTS) if base.num_experts else LINEAR_LAYERS
    for name in lora.target_modules or []:
        if name not in layers:
            raise ValueError(f"{field}.lora.target_modules: {name!r} must be one of {', '.join(layers)}")


class PPOSection(Section):
    stages: list[PPOStageConfig] = Field(default=[PPOStageConfig()], min_length=1, max_length=16)
    """PPO stages in order."""


class LifecycleConfig(Section):
    """Data → SFT → reward model → PPO stages, or DPO → evaluation → registration.

    Checked here is what no stage sees; each stage checks its inputs and fields as the graph is recorded.
    """

    project: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")] = "xray"
    """Name of the MLflow experiment; the policy is registered as `<project>-policy`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of every random choice."""
    gold: Gold | None = "vader"
    """Gold score of replies, never seen by the reward model or PPO: `vader`, `module:function` (your own
    `f(prompts, replies) -> scores`, in a module that XRAY_ALLOWED_IMPORTS names), or None."""
    data: DataConfig = DataConfig()
    base: BaseConfig = FreshBase()
    sft: SFTConfig | None = SFTConfig()
    """None: start from the base model, for example an instruct model."""
    preferences: PreferencesConfig | None = GoldPreferences()
    """None if neither a reward model nor DPO is trained."""
    reward: RewardConfig | None = RewardConfig()
    """The reward model to train; None: train none."""
    reward_ref: Annotated[str, Field(min_length=1)] | None = None
    """An existing reward model: a REF, as for `base.ref`."""
    reward_base: RewardBase | None = None
    """A reward model from the hub or a directory."""
    rewards: list[ExternalReward] = Field(default_factory=list)
    """Sources whose weighted scores are added to the reward model's score."""
    max_failed: UnitInterval = 0.1
    """Maximum share of the replies in a batch that may have no score; beyond it the stage fails."""
    ppo: PPOSection | None = PPOSection()
    """None: train the policy with `dpo`."""
    dpo: DPOConfig | None = None
    """Train the policy on `preferences` directly; a reward model from the same pairs is then only reported."""
    evaluate: EvaluateSection = EvaluateSection()
    benchmarks: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")], BenchmarkConfig] = Field(
        default_factory=dict
    )
    """Name → benchmark of the model that training starts from and of the policy after each stage."""
    generator: GeneratorConfig = GeneratorConfig()
    frozen: FrozenConfig = FrozenConfig()
    """The layout of models that only score, in PPO and evaluation: the reference and the reward model."""
    promotion: PromotionConfig = PromotionConfig()
    terms: dict[str, SourceTerms] = Field(default_factory=dict)
    """Licence, origin and personal data of each source, by the source's name in the config."""
    runtime: RuntimeConfig = RuntimeConfig()

    @property
    def ppo_stages(self) -> list[PPOStageConfig]:
        """PPO stages in order; none with `dpo`."""
        return self.ppo.stages if self.ppo is not None else []

    @property
    def trained(self) -> dict[str, TrainingConfig]:
        """Path of each section with training fields → the section."""
        return {path: part for path, part in sections(self) if isinstance(part, TrainingConfig)}

    @property
    def engines(self) -> dict[str, EngineConfig]:
        """Path of each engine of a trained model → the engine."""
        return {path: part for path, part in sections(self) if isinstance(part, EngineConfig)}

    @property
    def reads(self) -> list[str]:
        """Names of data and models from outside the store."""
        named = [part.source for part in self.data.sources] or [self.data.source]
        named += [
            model.model for model in (self.base, self.reward_base) if isinstance(model, PretrainedBase | RewardBase)
        ]
        return named + ([self.preferences.path] if isinstance(self.preferences, DatasetPreferences) else [])

    @model_validator(mode="after")
    def _terms(self) -> Self:
        unknown = sorted(set(self.terms) - set(self.reads))
        if unknown:
            raise ValueError(
                f"terms: {unknown[0]!r} is not a source in the config: must be one of {', '.join(self.reads)}"
            )
        return self

    @model_validator(mode="after")
    def _training_is_complete(self) -> Self:
        if (self.dpo is not None) == (self.ppo is not None):
            raise ValueError("ppo must be null where dpo is set" if self.dpo is not None else "ppo or dpo must be set")
        judged = self.evaluate.heldout_reward_model is not None
        trained = self.reward is not None or judged
        if self.preferences is not None and not (trained or self.dpo is not None):
            raise ValueError("preferences must be null where no reward model is trained")
        named = [name for name in ("reward", "reward_ref", "reward_base") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"{named[0]} must be null where {named[1]} names a reward model")
        return self

    @model_validator(mode="after")
    def _fresh_base_fits(self) -> Self:
        # Only a fresh base states its shape; engines check other models when they load them.
        if isinstance(self.base, FreshBase):
            _check_split("frozen", self.frozen, self.base)
            for name, engine in self.engines.items():
                _check_split(name, engine, self.base)
                _check_divides(name, engine, self.base)
            for name, section in self.trained.items():
                if section.lora is not None:
                    _check_adapters(name, section.lora, self.base)
            _check_heads("generator", self.generator.tensor_parallel, self.base)
            limit = self.base.max_positions
            new_tokens = [*(stage.max_new_tokens for stage in self.ppo_stages), self.evaluate.max_new_tokens]
            if self.sft is not None and self.sft.max_response_tokens is not None:
                new_tokens.append(self.sft.max_response_tokens)
            if isinstance(self.preferences, GoldPreferences):
                new_tokens.append(self.preferences.max_new_tokens)
            # Without a limit in the config, stages limit prompts to the context that a reply leaves.
            needed = (self.data.max_prompt_tokens or 1) + max(new_tokens)
            if needed > limit:
                raise ValueError(
                    f"data.max_prompt_tokens + the longest reply = {needed} must be at most base.max_positions = "
                    f"{limit}"
                )
        return self
