"""PPO and its penalty."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.config.engines import (
    Count,
    EngineConfig,
    Fraction,
    FrozenConfig,
    GeneratorConfig,
    NonNegative,
    Positive,
    Section,
    TrainingConfig,
    UnitInterval,
    check_one_row_each,
    check_whole_layers,
)
from xray_runtime.config.sources import Gold


class RewardTerm(Section):
    """One of the sources whose weighted sum is the reward."""

    weight: float = 1.0
    model: Annotated[str, Field(pattern=r"^rewards\.\d+$")] | None = None
    """The input that scores: `rewards.0` is the first reward model."""
    function: str | None = None
    """The function that scores, `module:function`, or the name of one that was handed over."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.function is None):
            raise ValueError("one of model and function must be set")
        return self


class JudgingConfig(Section):
    """What stages that sample and score replies share."""

    rewards: list[RewardTerm] = Field(default_factory=list)
    """Sources of the reward; their weighted sum counts."""
    gold: Gold | None = None
    """What replies are really worth, for the evaluation alone: it is logged and never trained on."""
    generator: GeneratorConfig = GeneratorConfig()
    frozen: FrozenConfig = FrozenConfig()
    """How models are spread that only score."""


class KLConfig(Section):
    """The penalty that keeps the policy near the reference."""

    controller: Literal["fixed", "adaptive"] = "adaptive"
    """`fixed` keeps `coef`; `adaptive` steers it towards `target` (Ziegler et al. 2019)."""
    coef: NonNegative = 0.05
    """(Initial) weight of the per-token penalty in the reward."""
    target: Positive = 4.0
    """Wanted KL of a whole reply (sum over its tokens), in nats; adaptive only."""
    horizon: Positive = 2000.0
    """Replies over which the adaptive controller may change the weight e-fold or so."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Per-token estimator in the penalty: k1 = logp − ref, k2 = ½(logp − ref)²,
    k3 = e^(ref−logp) − 1 + (logp − ref)."""


class PPOStageConfig(TrainingConfig):
    """One PPO stage; each starts from the checkpoint of the one before."""

    lr: Positive = 3e-4
    iterations: Count = 20
    """Rollout-and-update rounds."""
    prompts_per_iteration: Annotated[int, Field(ge=2)] = 64
    """Replies sampled in one iteration, one a prompt."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 16
    temperature: Positive = 1.0
    """Sampling temperature; training log-probabilities are taken at the same temperature."""
    epochs: Count = 4
    """Passes over one rollout."""
    minibatch_size: Count = 32
    """Replies in one optimizer step, over all Workhorses."""
    clip_range: Fraction = 0.2
    """Policy ratio is clipped to 1 ± this."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound on the loss where the advantage is negative (Ye et al. 2020); None: off."""
    value_clip_range: Positive = 0.2
    """Values may move this far from the rollout's before their loss is clipped."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss when policy and critic share a trunk."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    gamma: UnitInterval = 1.0
    gae_lambda: UnitInterval = 0.95
    whiten_advantages: bool = True
    """Scale advantages to mean 0 and deviation 1 over the valid tokens of the whole rollout."""
    kl: KLConfig = KLConfig()
    stop_kl: Positive | None = 0.5
    """End an iteration's updates early when the approximate KL to the rollout policy (k3, mean per token) exceeds
    this; None: never."""
    truncated: Literal["bootstrap", "penalize"] = "bootstrap"
    """What a reply cut off at max_new_tokens gets. `bootstrap`: no score, since a cut is no terminal state, but the
    critic's value of where it was cut. `penalize`: its score as if it had ended, minus `truncation_penalty`."""
    truncation_penalty: NonNegative = 1.0
    reward_scaling: Literal["reward_model", "running", "none"] = "reward_model"
    """`reward_model`: by the mean and deviation stored with the reward model; `running`: by this stage's own running
    moments; `none`: as scored."""
    reward_clip: Positive | None = 5.0
    """Bound on the absolute scaled reward; None: off."""
    critic: Literal["shared", "separate"] = "shared"
    """`shared`: a value head on the policy's trunk (trlX's way); `separate`: a model of its own, from the SFT model."""
    critic_lr: Positive = 1e-3
    """Peak learning rate of a separate critic."""
    critic_engine: EngineConfig | None = None
    """How a separate critic is trained; None: like the policy."""
    importance_correction: Literal["truncate", "mask", "none"] = "truncate"
    """Weights for the difference between the generator's and the trainer's log-probabilities: `truncate` caps them at
    `importance_cap`, `mask` drops tokens beyond it, `none` ignores the difference."""
    importance_cap: Annotated[float, Field(gt=1.0)] = 2.0
    max_mismatch: Positive = 0.1
    """Largest mean |log-probability difference| between generator and trainer on a fresh rollout; beyond it the
    generator does not hold the policy's weights, and the stage fails."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.prompts_per_iteration % self.minibatch_size:
            raise ValueError(
                f"minibatch_size = {self.minibatch_size} must divide prompts_per_iteration = "
                f"{self.prompts_per_iteration}"
            )
        check_one_row_each(self.engine, "minibatch_size", self.minibatch_size)
        if self.critic_engine is not None:
            if self.critic == "shared":
                raise ValueError("critic_engine must be absent when critic is 'shared': there is no critic of its own")
            check_one_row_each(self.critic_engine, "minibatch_size", self.minibatch_size, "critic_engine")
            check_whole_layers(self.lora, self.critic_engine, "critic_engine")
        return self


class PPOConfig(PPOStageConfig, JudgingConfig):
    """All that the stage kind `ppo` reads."""
