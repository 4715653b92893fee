"""PPO and its penalty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

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
    ValidationSchedule,
    check_one_row_each,
    check_whole_layers,
)
from xray_runtime.config.environment import EnvironmentConfig
from xray_runtime.config.methods import Method, with_method
from xray_runtime.config.rewards import RewardTerm
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.sampling import BIASING, Stop
from xray_runtime.config.sources import BuiltInOrFunction, GivenGold, is_function
from xray_runtime.config.watch import WatchConfig

PolicyLossName = Annotated[str, BuiltInOrFunction(("ppo", "gspo", "cispo"))]
AdvantagesName = Annotated[str, BuiltInOrFunction(("gae", "grpo", "dr_grpo", "rloo", "reinforce++"))]


class JudgingConfig(Section):
    """Fields shared by stages that sample and score replies."""

    rewards: list[RewardTerm] = Field(default_factory=list)
    """Sources of the reward; their weighted sum counts."""
    max_failed: UnitInterval = 0.1
    """Share of the replies scored at a time that may be left without a score; beyond it the stage fails."""
    gold: GivenGold | None = None
    """The true worth of replies, for the evaluation alone: it is logged and never trained on."""
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
    place: Literal["reward", "loss"] = "reward"
    """`reward`: subtracted from the reward, token by token, or as a whole where a group's replies are compared; `loss`:
    a term of the policy's loss, whose expected gradient is the KL's for each estimator."""


def _kept(value: Any) -> Any:
    if value in ("all", "none") or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"{value!r} is not allowed: must be 'all', 'none' or a number of iterations, at least 1")


class LedgerConfig(Section):
    """The rollouts a checkpoint keeps of those it learned from."""

    keep: Annotated[Literal["all", "none"] | int, BeforeValidator(_kept)] = "all"
    """The rollouts of `all` iterations, of `none`, or of so many last ones."""
    tokens: Literal["kept", "hashed"] = "kept"
    """`hashed`: of prompts, replies and all numbers of single tokens only salted digests, for private chats."""


class ValidationConfig(ValidationSchedule):
    """The policy's replies to the prompts of `data.validation_fraction`, while it is trained; the highest mean score is
    the best."""

    every: Count = 10
    """Iterations from one look to the next; the first is before the first update, the last after the last."""
    num_prompts: Annotated[int, Field(ge=2)] = 128


class PPOStageConfig(TrainingConfig):
    """One stage of policy gradients; each starts from the checkpoint of the one before."""

    method: Method = "ppo"
    """A published method: defaults for the fields below. `ppo`, `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`,
    `reinforce++`, `reinforce++_baseline`; `docs/methods.md` has their papers and settings."""
    lr: Positive = 3e-4
    iterations: Count = 20
    """Rollout-and-update rounds."""
    prompts_per_iteration: Annotated[int, Field(ge=2)] = 64
    """Prompts of one iteration."""
    samples_per_prompt: Count = 1
    """Replies to each of them: the group that `advantages` compares."""
    resample_rounds: Annotated[int, Field(ge=0, le=16)] = 0
    """How often an iteration samples other prompts in place of those whose replies all have one reward, and so teach
    nothing (DAPO's dynamic sampling)."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 16
    temperature: Positive = 1.0
    """Sampling temperature; training log-probabilities are taken at the same temperature."""
    stop: Stop = Field(default_factory=list)
    """Texts that end a reply, beside the tokens that end a turn; they stay in it."""
    environment: EnvironmentConfig | None = None
    """The environment that answers the replies, so that rollouts have many turns; its rewards count too. None: a single
    turn."""
    lag: Literal[0, 1] = 0
    """`1`: the next rollout is sampled by the weights of before this iteration's update, while that is at work. Replies
    are then one update old when they are trained on, which importance weights correct; the first ones are not."""
    epochs: Count = 4
    """Passes over one rollout."""
    minibatch_size: Count = 32
    """Replies in one optimizer step, over all Workhorses."""
    clip_range: Fraction = 0.2
    """Policy ratio is clipped to 1 ± this."""
    clip_range_high: Positive | None = None
    """Another bound upwards, 1 + this (clip-higher); None: `clip_range`."""
    loss: PolicyLossName = "ppo"
    """`ppo`: the clipped ratio of each token; `gspo`: of the whole reply (geometric mean); `cispo`: each token's
    gradient, weighted by its ratio cut at 1 + `clip_range_high`. Or a function of your own, of `PolicyLossInputs`."""
    loss_mean: Literal["tokens", "replies", "fixed"] = "tokens"
    """How the policy's loss, entropy bonus and KL term are averaged: over all tokens of a minibatch; over its replies,
    of each of which the mean over tokens is taken; or replies × `max_new_tokens` (with an environment its
    `max_tokens`), which knows no lengths."""
    advantages: AdvantagesName = "gae"
    """`gae`: by a critic. The others need none: `grpo`, `dr_grpo` and `rloo` compare the replies to one prompt,
    `reinforce++` takes the rewards still to come. Or a function of your own, of `AdvantageInputs`, which has no critic
    unless `critic` is set."""
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
    """With an environment 1, unless it is set: what pays comes many tokens after what earned it, and below 1 whitening
    makes those first tokens bad ones until the critic knows better."""
    whiten_advantages: bool = True
    """Scale advantages to mean 0 and deviation 1 over the valid tokens of the whole rollout."""
    kl: KLConfig = KLConfig()
    stop_kl: Positive | None = 0.5
    """End an iteration's updates early when the approximate KL to the rollout policy (k3, mean per token) exceeds
    this; None: never."""
    truncated: Literal["lowest", "penalize", "bootstrap"] = "lowest"
    """The reward of a reply cut off at max_new_tokens. `lowest`: its score as if it had ended, but at most the lowest
    of the rollout's replies that did end, so that going on never beats a bad ending. `penalize`: that score minus
    `truncation_penalty`. `bootstrap`: no score, since a cut is no terminal state, but the critic's value of where it
    was cut."""
    truncation_penalty: NonNegative = 1.0
    overlong_buffer: Count | None = None
    """A reply's last so many of `max_new_tokens` tokens cost up to 1, linearly (DAPO's soft overlong punishment)."""
    reward_scaling: Literal["reward_model", "running", "none"] = "reward_model"
    """`reward_model`: by the mean and deviation stored with the reward model; `running`: by this stage's own running
    moments; `none`: as scored."""
    reward_clip: Positive | None = 5.0
    """Bound on the absolute scaled reward; None: off."""
    critic: Literal["shared", "separate"] | None = None
    """`shared`: a value head on the policy's trunk (trlX's way); `separate`: a model of its own, from the SFT model.
    None: `shared` with `advantages: gae`, no critic with others."""
    critic_lr: Positive = 1e-3
    """Peak learning rate of a separate critic."""
    critic_engine: EngineConfig | None = None
    """How a separate critic is trained; None: like the policy."""
    importance_correction: Literal["truncate", "mask", "none"] = "truncate"
    """Weights for the difference between the generator's and the trainer's log-probabilities, with `lag` also of one
    update: `truncate` caps them at `importance_cap`, `mask` drops tokens beyond it, `none` ignores the difference."""
    importance_cap: Annotated[float, Field(gt=1.0)] = 2.0
    importance_level: Literal["token", "reply"] = "token"
    """`reply`: one weight for all tokens of a reply, the geometric mean of theirs."""
    max_mismatch: Positive = 0.1
    """Largest mean |log-probability difference| between generator and trainer at one policy version, over a fresh
    rollout, with `lag` over a few tokens after each sync; beyond it the generator does not hold the policy's weights,
    and the stage fails."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    watch: WatchConfig = WatchConfig()
    ledger: LedgerConfig = LedgerConfig()
    validation: ValidationConfig | None = None
    """None: the stage ends with its last version."""

    @property
    def rollout_size(self) -> int:
        """Replies of one iteration."""
        return self.prompts_per_iteration * self.samples_per_prompt

    @property
    def max_response_tokens(self) -> int:
        """Tokens that may follow a prompt."""
        return self.max_new_tokens if self.environment is None else self.environment.max_tokens

    @property
    def critic_in_use(self) -> Literal["shared", "separate", "none"]:
        """Where values come from."""
        return self.critic or ("shared" if self.advantages == "gae" else "none")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_method(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for field in BIASING:
            if field in given:
                raise ValueError(
                    f"{field} = {given[field]!r} is not allowed: ratios use log-probabilities over the whole "
                    "vocabulary, and replies sampled from part of it would bias them; change temperature instead"
                )
        if given.get("environment") is not None:
            of_episodes = {"reward_scaling": "none", "reward_clip": None, "overlong_buffer": None, "gae_lambda": 1.0}
            given = {**of_episodes, **given}
        return with_method(given, cls.model_fields["max_new_tokens"].default)

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.rollout_size % self.minibatch_size:
            raise ValueError(
                f"minibatch_size = {self.minibatch_size} must divide prompts_per_iteration × samples_per_prompt = "
                f"{self.rollout_size}"
            )
        if self.advantages in ("grpo", "dr_grpo", "rloo") and self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt} must be at least 2 with advantages = "
                f"{self.advantages!r}: replies to one prompt are compared"
            )
        if self.critic is not None and self.advantages != "gae" and not is_function(self.advantages):
            raise ValueError(
                f"critic = {self.critic!r} must be left out with advantages = {self.advantages!r}, which has none"
            )
        if self.critic_in_use == "none" and self.truncated == "bootstrap":
            raise ValueError(
                f"truncated = 'bootstrap' must be 'lowest' or 'penalize' with advantages = {self.advantages!r}: there "
                "is no critic to value a reply that was cut off"
            )
        if self.overlong_buffer is not None and self.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"overlong_buffer = {self.overlong_buffer} must be at most max_new_tokens = {self.max_new_tokens}"
            )
        if self.resample_rounds and self.samples_per_prompt < 2:
            raise ValueError(
                f"resample_rounds = {self.resample_rounds} must be 0 with samples_per_prompt = 1: a single "
                f"reply cannot tie"
            )
        if self.resample_rounds and self.lag:
            raise ValueError(
                f"resample_rounds = {self.resample_rounds} must be 0 with lag = {self.lag}: the generator is at work "
                "on the next rollout already"
            )
        if self.lag and self.importance_correction == "none":
            raise ValueError(
                f"importance_correction = 'none' must be 'truncate' or 'mask' with lag = {self.lag}: replies come from "
                "the policy before an update"
            )
        self._check_environment()
        check_one_row_each(self.engine, "minibatch_size", self.minibatch_size)
        if self.critic_engine is not None:
            if self.critic_in_use != "separate":
                raise ValueError("critic_engine must be left out unless critic is 'separate'")
            check_one_row_each(self.critic_engine, "minibatch_size", self.minibatch_size, "critic_engine")
            check_whole_layers(self.lora, self.critic_engine, "critic_engine")
        return self

    def _check_environment(self) -> None:
        environment = self.environment
        if environment is None:
            return
        environment.check_turns(self.max_new_tokens, self.stop)
        needed: dict[str, tuple[object, str]] = {
            "overlong_buffer": (None, "it is about the length of one reply"),
            "reward_scaling": ("none", "rewards of single turns count as they are"),
            "reward_clip": (None, "rewards of single turns count as they are"),
        }
        for field, (allowed, why) in needed.items():
            if getattr(self, field) != allowed:
                raise ValueError(f"{field} = {getattr(self, field)!r} must be {allowed!r} with an environment: {why}")

    def check_runtime(self, runtime: RuntimeConfig) -> None:
        """Raises ValueError where `lag` or the engine does not go with `runtime`."""
        cut = self.engine.data_parallel < self.engine.num_workhorses
        if cut and runtime.weight_transfer != "plasma":
            raise ValueError(
                f"engine: tensor_parallel or pipeline_parallel above 1 is not allowed with runtime.weight_transfer = "
                f"{runtime.weight_transfer!r}: only 'plasma' sends the weights of a model that is cut"
            )
        for field in ("generator_sleeps", "trainer_sleeps"):
            if self.lag and getattr(runtime, field):
                raise ValueError(
                    f"lag = {self.lag} must be 0 with runtime.{field} = True: generator and trainer work at the same "
                    "time, not in turn on one GPU"
                )


class PPOConfig(PPOStageConfig, JudgingConfig):
    """All that the stage kind `ppo` reads."""

    judges: list[RewardTerm] = Field(default_factory=list)
    """Sources that score in `validation` in place of the rewards, so that a version that only pleases the rewards is
    not chosen."""
