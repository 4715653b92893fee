"""Fields for training, sampling from and placing models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from xray_runtime.config.runtime import RuntimeConfig

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]
Precision = Literal["auto", "float32", "bfloat16"]
S = TypeVar("S", bound=BaseModel)


class Section(BaseModel):
    """A frozen part of the config: no unknown keys, no silent coercion."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def check_runtime(self, runtime: RuntimeConfig) -> None:
        """Raises ValueError if the config of a stage conflicts with `runtime`; the message begins with a field."""


class ValidationSchedule(Section):
    """How often a model is validated during training, and which version the stage publishes."""

    every: Count = 20
    """Steps between validations; one more follows the last step."""
    keep: Literal["best", "last"] = "best"
    """The version to publish: the one with the best validation result, or the last."""

    def is_due(self, done: int, steps: int) -> bool:
        """Whether to validate after `done` of `steps`."""
        return done == steps or done % self.every == 0


class LayoutConfig(Section):
    """The parallel layout of one model: tensor × pipeline × data parallel Workhorses."""

    num_workhorses: Annotated[int, Field(ge=1, le=1024)] = 1
    """Workhorses (one device each) of the whole model: tensor_parallel × pipeline_parallel × data-parallel ranks."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of Workhorses that share each layer's matrices (DeepSpeed AutoTP, or Megatron's layers)."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of pipeline stages that share the layers; for models built like Llama."""

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
        """Number of data-parallel replicas."""
        return self.num_workhorses // (self.tensor_parallel * self.pipeline_parallel)


class FrozenConfig(LayoutConfig):
    """The layout and precision of models that only score."""

    zero_stage: Literal[0, 3] = 0
    """3: shard the weights over the data-parallel Workhorses, which gather each layer when they compute it."""
    precision: Precision = "auto"
    """`bfloat16` halves the memory of weights and activations; `auto`: `bfloat16` on CUDA, `float32` on CPU."""

    @model_validator(mode="after")
    def _layout(self) -> Self:
        check_partitioned(self, self.zero_stage, 0)
        return self


class EngineConfig(LayoutConfig):
    """How one model is trained, with ZeRO over the data-parallel Workhorses."""

    library: Literal["deepspeed", "megatron"] = "deepspeed"
    """`deepspeed`, or `megatron`: Megatron-core's layers, for Llama models. On CPU Megatron supports tensor and data
    parallelism; pipeline_parallel and zero_stage 1 (its distributed optimizer) need CUDA."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """ZeRO stage: 0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters. None: the lowest stage
    that the other fields allow."""
    micro_batch_tokens: Annotated[int, Field(ge=16)] = 4096
    """Padded tokens in one forward pass. It changes memory, not results."""
    precision: Precision = "auto"
    """`bfloat16`: mixed precision. Passes run in bfloat16; gradients are summed and weights updated and saved in
    float32. DeepSpeed needs zero_stage 1 or higher for it, even on one Workhorse. `auto`: `bfloat16` on CUDA, and
    `float32` on CPU and with DeepSpeed's zero_stage 0."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass: less memory, bit-identical results."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """`cpu`: keep optimizer states, and with zero_stage 3 weights, in host memory (ZeRO-Offload); `nvme`: in files
    under nvme_path (ZeRO-Infinity). Results differ only in float rounding. `cpu` needs zero_stage 1 or higher, `nvme`
    needs 3 and CUDA."""
    nvme_path: Annotated[str, Field(min_length=1)] | None = None
    """Directory on every node's local disk, for offload 'nvme'. Files of ended processes in it are removed."""

    @model_validator(mode="after")
    def _layout(self) -> Self:
        check_partitioned(self, self.zero, 2)
        if (self.offload == "nvme") != (self.nvme_path is not None):
            path = "null" if self.nvme_path is None else repr(self.nvme_path)
            raise ValueError(
                f"nvme_path = {path} is not allowed with offload = {self.offload!r}: set it for 'nvme' only"
            )
        if self.library == "megatron":
            self._check_megatron()
        return self

    def _check_megatron(self) -> None:
        if self.zero > 1:
            raise ValueError(f"zero_stage = {self.zero} must be at most 1 with library 'megatron'")
        for field in ("offload", "activation_checkpointing"):
            value, default = getattr(self, field), type(self).model_fields[field].default
            if value != default:
                raise ValueError(f"{field} = {value!r} must be {default!r} with library 'megatron'")

    @property
    def least_zero_stage(self) -> int:
        """The lowest ZeRO stage that supports the other fields: DeepSpeed's ZeRO 0 sums gradients in bfloat16, and only
        ZeRO 3 offloads to disk."""
        if self.offload == "nvme":
            return 3
        return int(self.offload != "none" or (self.precision == "bfloat16" and self.library == "deepspeed"))

    @property
    def zero(self) -> int:
        """`zero_stage`, or the lowest possible stage if that is None."""
        return self.least_zero_stage if self.zero_stage is None else self.zero_stage

    def check_zero_stage(self) -> None:
        """Raises ValueError if `zero_stage` is too low for the other fields."""
        if self.zero < self.least_zero_stage:
            field = "precision" if self.offload == "none" else "offload"
            raise ValueError(
                f"zero_stage = {self.zero} must be at least {self.least_zero_stage} with {field} = "
                f"{getattr(self, field)!r}"
            )

    @property
    def cuda_only(self) -> str | None:
        """The setting that Megatron-core does not support on CPU, as `field: value`; None if there is none."""
        if self.library == "megatron" and self.pipeline_parallel > 1:
            return f"pipeline_parallel: {self.pipeline_parallel}"
        if self.library == "megatron" and self.zero:
            return f"zero_stage: {self.zero}"
        return None


def with_precision(section: S, device: str) -> S:
    """`section` with the precision that `auto` means on `device` ("cpu" or "cuda"), however deep in it."""
    found = {name: _with_precision(getattr(section, name), device) for name in type(section).model_fields}
    if isinstance(section, FrozenConfig | EngineConfig) and section.precision == "auto":
        only_float32 = isinstance(section, EngineConfig) and section.library == "deepspeed" and section.zero_stage == 0
        found["precision"] = "bfloat16" if device == "cuda" and not only_float32 else "float32"
    return section.model_copy(update=found)


def _with_precision(value: Any, device: str) -> Any:
    if isinstance(value, BaseModel):
        return with_precision(value, device)
    if isinstance(value, list):
        return [_with_precision(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _with_precision(item, device) for key, item in value.items()}
    return value


def check_partitioned(layout: LayoutConfig, zero_stage: int, most: int) -> None:
    """Raises ValueError if ZeRO-3 would partition a model that is already split, for which `most` is the limit."""
    if zero_stage == 3 and layout.tensor_parallel * layout.pipeline_parallel > 1:
        raise ValueError(f"zero_stage = 3 must be at most {most} with tensor_parallel or pipeline_parallel above 1")


LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Llama, without its output layer."""


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al. 2021): W + alpha / rank · B·A, where only A and B are trained. There is no dropout,
    because rollout and update must compute log-probabilities with the same function."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """Scale of B·A, divided by `rank`."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the linear layers with adapters, such as `[q_proj, v_proj]`; None: all but the output layer and
    a mixture's experts."""


class TrainingConfig(Section):
    """Fields of every trained model: AdamW, a learning-rate schedule, clipping, an engine."""

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
    trainable_layers: Count | None = None
    """Train only this many top layers (None: all) of models built like Llama. Policy, reference, critic and reward
    models then share one frozen trunk, whose states are computed once per rollout; for a dataset they are computed once
    and kept beside it."""
    lora: LoRAConfig | None = None
    """Train only low-rank adapters (and the scalar head); None: all weights. The published checkpoint contains the
    merged weights. A separate critic uses the same setting."""
    max_skipped_steps: Annotated[int, Field(ge=0)] = 0
    """Number of optimizer steps that the stage may skip because the loss or the gradient is NaN or infinite; one more
    fails the stage. A skipped step changes no weights and no optimizer states."""
    engine: EngineConfig = EngineConfig()

    rows_of_a_step: ClassVar[str] = "batch_size"
    """The field with the number of rows of an optimizer step."""

    @model_validator(mode="after")
    def _fits_the_engine(self) -> Self:
        if rows := getattr(self, self.rows_of_a_step, None):
            check_one_row_each(self.engine, self.rows_of_a_step, rows)
        check_whole_layers(self.lora, self.engine, "engine")
        if self.lora is not None and self.trainable_layers is not None:
            raise ValueError("lora must be null where trainable_layers is set: train either adapters or whole layers")
        return self


FUSED_LAYERS = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Linear layers that vLLM holds as one."""


def check_fused_layers(lora: LoRAConfig, weight_transfer: str) -> None:
    """Raises ValueError if `lora` trains a part of a layer that vLLM holds as one, since `weight_transfer` replaces
    whole layers."""
    trained = set(lora.target_modules or LINEAR_LAYERS)
    for fused in FUSED_LAYERS:
        if trained & fused and fused - trained:
            raise ValueError(
                f"lora.target_modules: {sorted(trained & fused)} without {sorted(fused - trained)} is not allowed with "
                f"runtime.weight_transfer = {weight_transfer!r}: only 'plasma' updates a part of a fused layer"
            )


def check_whole_layers(lora: LoRAConfig | None, engine: EngineConfig, name: str) -> None:
    """Raises ValueError if `engine`, the field `name`, cannot train adapters."""
    if lora is not None and engine.library == "megatron":
        raise ValueError(f"lora must be null with {name}.library = 'megatron'")
    if lora is not None and engine.tensor_parallel * engine.pipeline_parallel > 1:
        raise ValueError(
            f"lora must be null with {name}.tensor_parallel = {engine.tensor_parallel} and {name}.pipeline_parallel = "
            f"{engine.pipeline_parallel}: adapters support ZeRO only"
        )


def check_one_row_each(engine: LayoutConfig, field: str, rows: int, section: str = "engine") -> None:
    """Raises ValueError if `rows`, the value of `field`, is less than the number of data-parallel ranks of `engine`."""
    replicas = engine.data_parallel
    if rows < replicas:
        name = "num_workhorses" if replicas == engine.num_workhorses else "data_parallel"
        raise ValueError(f"{field} = {rows} must be at least {section}.{name} = {replicas}")


class GeneratorConfig(Section):
    """The engine that samples replies. Libraries and layouts round differently, so all fields are part of the key of
    every stage that samples."""

    engine: Literal["vllm", "deepspeed", "transformers"] = "vllm"
    """`vllm`; `deepspeed`: DeepSpeed Inference; `transformers`: `generate`."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of Workhorses that share the model (vllm and deepspeed); must divide the model's attention heads."""

    @model_validator(mode="after")
    def _splittable(self) -> Self:
        if self.engine == "transformers" and self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} must be 1 with engine 'transformers' (vllm and "
                "deepspeed can split a model)"
            )
        return self

    def precision(self, device: str) -> Literal["float32", "bfloat16"]:
        """The precision of weights and activations on `device` ("cpu" or "cuda")."""
        return "bfloat16" if self.engine == "vllm" and device == "cuda" else "float32"
