"""The part of the schema that says how models are trained, sampled from and placed; `config` has the rest."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A frozen part of the config: no unknown keys, no silent coercion."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class LayoutConfig(Section):
    """How one model is spread: tensor × pipeline × data parallel Workhorses."""

    num_workhorses: Annotated[int, Field(ge=1, le=1024)] = 1
    """Workhorses (one device each) of the whole model: tensor_parallel × pipeline_parallel × data-parallel ranks."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Split each layer's matrices over so many Workhorses (DeepSpeed AutoTP, or Megatron's layers)."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Deal the layers to so many stages, of models built like Llama."""

    @model_validator(mode="after")
    def _whole_replicas(self) -> Self:
        replica = self.tensor_parallel * self.pipeline_parallel
        if self.num_workhorses % replica:
            raise ValueError(
                f"num_workhorses = {self.num_workhorses} must be a multiple of tensor_parallel × pipeline_parallel = "
                f"{replica}"
            )
        return self

    @property
    def data_parallel(self) -> int:
        """Replicas, each with rows of its own."""
        return self.num_workhorses // (self.tensor_parallel * self.pipeline_parallel)


class EngineConfig(LayoutConfig):
    """How one model is trained, with ZeRO over the data-parallel Workhorses."""

    library: Literal["deepspeed", "megatron"] = "deepspeed"
    """`deepspeed`; `megatron`: Megatron-core's layers, for Llamas. On CPU it takes tensor and data parallelism;
    pipeline_parallel and zero_stage 1 (its distributed optimizer) need CUDA."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """ZeRO stage: 0 replicates, 1 shards optimizer states, 2 gradients too, 3 parameters too."""
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
        if self.tensor_parallel * self.pipeline_parallel > 1 and self.zero_stage == 3:
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
        check_whole_layers(self.lora, self.engine, "engine")
        return self


def check_whole_layers(lora: LoRAConfig | None, engine: EngineConfig, name: str) -> None:
    """Raises ValueError where `engine`, the field `name`, cannot train adapters."""
    if lora is not None and engine.library == "megatron":
        raise ValueError(f"lora must be null with {name}.library = 'megatron'")
    if lora is not None and engine.tensor_parallel * engine.pipeline_parallel > 1:
        raise ValueError(
            f"lora must be null with {name}.tensor_parallel = {engine.tensor_parallel} and {name}.pipeline_parallel = "
            f"{engine.pipeline_parallel}: adapters go with ZeRO alone"
        )


def check_one_row_each(engine: LayoutConfig, field: str, rows: int, section: str = "engine") -> None:
    """Raises ValueError where `rows`, the value of `field`, are fewer than the data-parallel ranks of `engine`."""
    replicas = engine.data_parallel
    if rows < replicas:
        name = "num_workhorses" if replicas == engine.num_workhorses else "data_parallel"
        raise ValueError(f"{field} = {rows} must be at least {section}.{name} = {replicas}")


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
    trainer_sleeps: bool = False
    """CUDA only: while replies are sampled, what is trained keeps its weights and optimizer states in host memory and
    gives its GPU memory to the generator."""
    weight_transfer: Literal["auto", "plasma", "nccl", "ipc"] = "plasma"
    """How weights go from the trainer to the generator. `plasma`: Ray's object store; `ipc`: the same GPUs, shared;
    `nccl`: between GPUs (both vLLM only). `auto`: ipc, nccl or plasma, by where both are."""
    parallel: Literal["as_written", "auto"] = "as_written"
    """`auto`: every engine's layout, and on CUDA the shares of a GPU, are chosen for the cluster by the planner's
    memory model before anything starts; the run's config.yaml records what was chosen."""
    storage: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\s?#]+$")] | None = None
    """URL of a store that several machines share (`s3://BUCKET/PREFIX`, `file:///PATH`, whatever fsspec knows):
    checkpoints, snapshots, records and results lie there too, and what is there is fetched, never computed again."""
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

    @field_validator("storage")
    @classmethod
    def _others_can_open_it(cls, url: str | None) -> str | None:
        if url is not None and re.search(r"://[^/]*:[^/]*@", url):
            raise ValueError("a password is not allowed in the URL: credentials come from the environment")
        if url is not None and re.match(r"memory:|file://[^/]", url):
            raise ValueError(f"{url!r} is not allowed: must be found from other processes (file:///ABSOLUTE/PATH)")
        return url
