"""PPO stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.engines.layouts import EngineConfig, check_one_row_each
from xray_runtime.engines.sampling_config import Stop
from xray_runtime.engines.training_config import TrainingConfig, check_trained_part
from xray_runtime.kernel.config.section import (
    Count,
    NonNegative,
    Positive,
    RuntimeConfig,
    Section,
    UnitInterval,
    ValidationSchedule,
)
from xray_runtime.kernel.config.sources import BuiltInOrFunction, is_function
from xray_runtime.methods.common.environment import AnyEnvironment
from xray_runtime.methods.common.mismatch import BFLOAT16_MISMATCH, FLOAT32_MISMATCH
from xray_runtime.methods.ppo.adapter_sync import AdapterSync, check_served, check_transfer
from xray_runtime.methods.ppo.config_checks import (
    check_awake,
    check_correction,
    check_cuts,
    check_environment,
    check_reported,
    check_sources,
)
from xray_runtime.methods.ppo.curriculum_config import CurriculumConfig, check_order
from xray_runtime.methods.ppo.distillation_config import DistillationConfig
from xray_runtime.methods.ppo.ledger_config import LedgerConfig
from xray_runtime.methods.ppo.preset import PRESETS, Preset
from xray_runtime.methods.ppo.published import Method, with_method
from xray_runtime.methods.ppo.routing import RoutingName, check_routing, check_routing_device
from xray_runtime.methods.ppo.sampled_tokens import SampledTokensConfig
from xray_runtime.methods.ppo.watch import WatchConfig
from xray_runtime.rewards.config import JudgingConfig, RewardTerm
from xray_runtime.rewards.term import Term

_PRESETS: Mapping[str, Preset] = {name: PRESETS.get(name) for name in PRESETS}
_LOSSES = ("ppo", "gspo", "cispo", *(name for name, preset in _PRESETS.items() if preset.loss))
_ESTIMATORS = [name for name, preset in _PRESETS.items() if preset.advantages]
_COMPARED = ("grpo", "dr_grpo", "rloo", *(name for name in _ESTIMATORS if _PRESETS[name].compares))
"""Estimators that compare the replies to one prompt."""
PolicyLossName = Annotated[str, BuiltInOrFunction(_LOSSES)]
AdvantagesName = Annotated[str, BuiltInOrFunction(("gae", "reinforce++", "grpo", "dr_grpo", "rloo", *_ESTIMATORS))]


class KLConfig(Section):
    """The KL penalty, which keeps the policy close to the reference."""

    controller: Literal["fixed", "adaptive"] = "adaptive"
    """`fixed` keeps `coef`; `adaptive` adjusts it so that the KL approaches `target` (Ziegler et al. 2019)."""
    coef: NonNegative = 0.05
    """(Initial) weight of the per-token penalty in the reward."""
    target: Positive = 4.0
    """Target KL of a whole reply (sum over its tokens), in nats; adaptive only."""
    horizon: Positive = 2000.0
    """Number of replies over which the adaptive controller may change the weight by a factor of about e."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Per-token estimator in the penalty: k1 = logp − ref, k2 = ½(logp − ref)²,
    k3 = e^(ref−logp) − 1 + (logp − ref)."""
    place: Literal["reward", "loss"] = "reward"
    """`reward`: subtract the penalty from the reward, per token, or per reply if replies are compared in groups;
    `loss`: add a term to the policy's loss, whose expected gradient is the KL's for each estimator."""


class ValidationConfig(ValidationSchedule):
    """The policy's replies to the prompts of `data.validation_fraction`, sampled during training; the highest mean
    score is the best."""

    every: Count = 10
    """Iterations between validations; the first precedes the first update, the last follows the last."""
    num_prompts: Annotated[int, Field(ge=2)] = 128


class PPOStageConfig(SampledTokensConfig, TrainingConfig):
    """One stage of policy-gradient training; each starts from the previous stage's checkpoint."""

    method: Method = "ppo"
    """A published method: defaults for the fields below; `docs/methods.md` has their papers and settings."""
    lr: Positive = 3e-4
    iterations: Count = 20
    """Number of iterations, each a rollout and its updates."""
    prompts_per_iteration: Annotated[int, Field(ge=2)] = 64
    """Prompts per iteration."""
    samples_per_prompt: Count = 1
    """Replies per prompt: the group that `advantages` compares."""
    resample_rounds: Annotated[int, Field(ge=0, le=16)] = 0
    """How many times an iteration may replace prompts whose replies all have the same reward, and so give no gradient
    (DAPO's dynamic sampling)."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 16
    temperature: Positive = 1.0
    """Sampling temperature; training log-probabilities use the same temperature."""
    stop: Stop = Field(default_factory=list)
    """Texts that end a reply, in addition to the tokens that end a turn; the reply includes them."""
    curriculum: CurriculumConfig | None = None
    """Which prompts are drawn. None: all, in a new random order each epoch."""
    environment: AnyEnvironment | None = None
    """The environment that answers replies in multi-turn rollouts; its rewards are added. None: a single turn."""
    lag: Annotated[int, Field(ge=0, le=8)] = 0
    """`n`: sample the n-th rollout from now with the current weights while the update runs. Replies are then up to n
    updates old when the policy trains on them; importance weights correct this. More than 1 makes nothing faster, but
    shows what older replies cost."""
    in_flight_updates: bool = False
    """With `lag`: replies and episodes run on while weights change, so that a slow one holds nobody up. An iteration
    trains on the first prompts whose replies are all complete, and each token is weighted by the version that sampled
    it. A reply or an episode with a token more than `lag` updates old begins anew. Time decides the schedule, which is
    recorded: a run that was killed and a replay follow the record, but two runs may differ."""
    oversample: UnitInterval = 0.0
    """With `in_flight_updates`: this share more prompts of an iteration are under way, and each iteration gives up as
    many of those that run longest. Then short replies are trained on more often than they are sampled."""
    epochs: Count = 4
    """Passes over each rollout."""
    minibatch_size: Count = 32
    """Replies per optimizer step, over all Workhorses."""
    clip_range: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The policy ratio is clipped to 1 ± this."""
    clip_range_high: Positive | None = None
    """A different upper bound, 1 + this (clip-higher); None: `clip_range`."""
    loss: PolicyLossName = "ppo"
    """`ppo`: the clipped ratio of each token; `gspo`: of the whole reply (geometric mean); `cispo`: each token's
    gradient, weighted by its ratio capped at 1 + `clip_range_high`; or that of a later method
    (`docs/methods.md`). Or your own function of `PolicyLossInputs`."""
    loss_mean: Literal["tokens", "replies", "fixed"] = "tokens"
    """How the policy's loss, entropy bonus and KL term are averaged: over all tokens of a minibatch; over tokens within
    each reply, then over replies; or as a sum divided by replies × `max_new_tokens` (with an environment its
    `max_tokens`), which does not depend on lengths."""
    advantages: AdvantagesName = "gae"
    """`gae` uses a critic. The others need none: `grpo`, `dr_grpo` and `rloo` compare the replies to one prompt,
    `reinforce++` sums the future rewards; `max_rl` and `gdpo` are those of the methods. Or your own function of
    `AdvantageInputs`, without a critic unless `critic` is set."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound on the loss where the advantage is negative (Ye et al. 2020); None: off."""
    value_clip_range: Positive = 0.2
    """How far values may move from the rollout's before their loss is clipped."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss if policy and critic share a trunk."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    observation_coef: NonNegative = 0.0
    """Weight of the mean cross-entropy of the tokens that the policy reads between its turns: answers of environments
    and tools (ECHO). It has a count of its own."""
    gamma: UnitInterval = 1.0
    gae_lambda: UnitInterval = 0.95
    """Default with an environment: 1. Its rewards come many tokens after the actions that earn them; below 1,
    whitening would give those actions negative advantages until the critic has learned."""
    whiten_advantages: bool = True
    """Scale advantages to mean 0 and standard deviation 1 over the valid tokens of the rollout."""
    kl: KLConfig = KLConfig()
    stop_kl: Positive | None = 0.5
    """Stop an iteration's updates when the approximate KL to the rollout policy (k3, mean per token) exceeds this;
    None: never."""
    truncated: Literal["lowest", "penalize", "bootstrap"] = "lowest"
    """The reward of a reply truncated at max_new_tokens. `lowest`: its score as if it were complete, but at most the
    lowest score of the rollout's complete replies, so that truncation never pays. `penalize`: its score minus
    `truncation_penalty`. `bootstrap`: the critic's value of the last state instead of a score."""
    truncation_penalty: NonNegative = 1.0
    overlong_buffer: Count | None = None
    """Length of the zone before `max_new_tokens` in which a penalty rises linearly to 1 (DAPO's soft overlong
    punishment)."""
    reward_scaling: Literal["reward_model", "running", "none"] = "reward_model"
    """`reward_model`: scale by the mean and deviation stored with the reward model; `running`: by this stage's running
    moments; `none`: do not scale."""
    reward_clip: Positive | None = 5.0
    """Bound on the absolute scaled reward; None: off."""
    routing: RoutingName = "own"
    """The experts of a mixture in the policy's passes. `own`: its routers choose. `replay`: those that the generator
    chose for the same tokens, weighted by the policy's routers, in old log-probabilities and updates alike (R3, Ma et
    al. 2025); the ledger keeps them with the generator's weights. Reference and critic choose their own."""
    critic: Literal["shared", "separate"] | None = None
    """`shared`: a value head on the policy's trunk (as in trlX); `separate`: a second model, initialized from the SFT
    model. None: `shared` with `advantages: gae`, else no critic."""
    critic_lr: Positive = 1e-3
    """Peak learning rate of a separate critic."""
    critic_engine: EngineConfig | None = None
    """Training engine of a separate critic; None: like the policy's."""
    max_mismatch: Positive | None = None
    """Maximum mean |log-probability difference| between generator and trainer at one policy version, over a fresh
    rollout, or with `lag` over a few tokens after each sync. A larger difference means that the generator has other
    weights or computes another model, and fails the stage. None: 1e-4 where both compute in float32, else 0.05."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    adapter_sync: AdapterSync = "auto"
    """How the generator gets what `lora` trains. `adapter`: as it is, some megabytes, beside the frozen weights.
    `merged`: as whole matrices, with which it samples faster. `auto`: `adapter` where the generator can and computes in
    bfloat16, which would round small changes of a matrix away; else `merged`."""
    distillation: DistillationConfig | None = None
    """A teacher beside the reward. None: no teacher."""
    watch: WatchConfig = WatchConfig()
    ledger: LedgerConfig = LedgerConfig()
    validation: ValidationConfig | None = None
    """None: publish the last version."""

    rows_of_a_step: ClassVar[str] = "minibatch_size"

    @property
    def rollout_size(self) -> int:
        """Rows per iteration: replies, or episodes, one for each of their seats."""
        seats = 1 if self.environment is None else self.environment.rows_an_episode
        return self.prompts_per_iteration * self.samples_per_prompt * seats

    @property
    def max_response_tokens(self) -> int:
        """Maximum number of tokens after a prompt."""
        return self.max_new_tokens if self.environment is None else self.environment.max_tokens

    @property
    def critic_in_use(self) -> Literal["shared", "separate", "none"]:
        """The critic, with defaults resolved."""
        return self.critic or ("shared" if self.advantages == "gae" else "none")

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model."""
        return True

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_method(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if given.get("environment") is not None:
            of_episodes = {"reward_scaling": "none", "reward_clip": None, "overlong_buffer": None, "gae_lambda": 1.0}
            given = {**of_episodes, **given}
        return with_method(given, cls.model_fields["max_new_tokens"].default)

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.rollout_size % self.minibatch_size:
            seats = " × seats" if getattr(self.environment, "seats", ()) else ""
            raise ValueError(
                f"minibatch_size = {self.minibatch_size} must divide prompts_per_iteration × samples_per_prompt{seats} "
                f"= {self.rollout_size}"
            )
        if self.advantages in _COMPARED and self.samples_per_prompt < 2:
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
                "is no critic to estimate the value of a truncated reply"
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
                f"resample_rounds = {self.resample_rounds} must be 0 with lag = {self.lag}: the generator already "
                "samples the next rollout"
            )
        if not is_function(self.loss):
            check_correction(self, self.loss in _PRESETS and _PRESETS[self.loss].anchored)
        check_sources(self)
        check_order(self.curriculum, self.samples_per_prompt, in_flight=self.in_flight_updates)
        check_environment(self)
        if self.critic_engine is not None:
            if self.critic_in_use != "separate":
                raise ValueError("critic_engine must be left out unless critic is 'separate'")
            check_one_row_each(self.critic_engine, "minibatch_size", self.minibatch_size, "critic_engine")
            check_trained_part(self.lora, self.trainable_layers, self.critic_engine, "critic_engine")
        return self

    def plugs(self) -> tuple[str, ...]:
        return tuple(sorted({PRESETS.module(name) for name in (self.loss, self.advantages) if name in _PRESETS}))

    def check_runtime(self, runtime: RuntimeConfig, path: str) -> None:
        """Raises ValueError if `lag` or the engine conflicts with `runtime`."""
        if self.engine.is_split and runtime.weight_transfer in ("nccl", "ipc"):
            raise ValueError(
                f"engine: tensor_parallel or pipeline_parallel above 1 is not allowed with runtime.weight_transfer = "
                f"{runtime.weight_transfer!r}: only 'plasma' sends the weights of a split model"
            )
        check_awake(self.environment, runtime)
        for field in ("generator_sleeps", "trainer_sleeps"):
            if self.lag and getattr(runtime, field):
                raise ValueError(
                    f"lag = {self.lag} must be 0 with runtime.{field} = True: generator and trainer work at the same "
                    "time and cannot take turns on one GPU"
                )


class PPOConfig(PPOStageConfig, JudgingConfig):
    """All fields of the stage kind `ppo`."""

    judges: list[RewardTerm] = Field(default_factory=list)
    """Sources that replace the rewards in `validation`, so that a version that only exploits the rewards is not
    chosen."""

    @property
    def replies_per_prompt(self) -> int:
        return self.samples_per_prompt

    @property
    def keeps_answers(self) -> bool:
        return self.ledger.keep != "none" and self.ledger.tokens == "kept"

    @property
    def terms(self) -> dict[str, list[Term]]:
        return {"rewards": self.rewards, "judges": self.judges}

    @model_validator(mode="after")
    def _generator_and_scorers_fit(self) -> Self:
        check_served(self.adapter_sync, self.lora, self.generator)
        check_routing(self.routing, self.engine, self.generator, self.environment, self.trainable_layers)
        check_one_row_each(self.frozen, "prompts_per_iteration × samples_per_prompt", self.rollout_size, "frozen")
        check_cuts(self)
        if self.score_centering:
            check_reported(self, "score_centering = True", self.top_logprobs)
        return self

    def check_runtime(self, runtime: RuntimeConfig, path: str) -> None:
        super().check_runtime(runtime, path)
        check_routing_device(self.routing, self.generator, runtime)
        check_transfer(self.adapter_sync, self.lora, self.generator, runtime)

    @property
    def called_functions(self) -> list[str]:
        names = self.advantages, self.loss, *([] if self.curriculum is None else [self.curriculum.by])
        return [*super().called_functions, *filter(is_function, names)]

    def mismatch_limit(self, device: str) -> float:
        """`max_mismatch`, or its default on `device` ("cpu" or "cuda")."""
        if self.max_mismatch is not None:
            return self.max_mismatch
        in_float32 = self.engine.resolved(device).precision == "float32"
        return FLOAT32_MISMATCH if in_float32 and self.generator.precision(device) == "float32" else BFLOAT16_MISMATCH
