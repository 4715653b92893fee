"""Fields of every trained model: optimizer, schedule, adapters, engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.engines.layouts import GENERATORS, EngineConfig, GeneratorConfig, check_one_row_each
from xray_runtime.kernel.config.section import Count, NonNegative, Positive, Section, UnitInterval
from xray_runtime.kernel.plugs import able, can, unsupported
from xray_runtime.models.lora import EXPERTS, LINEAR_LAYERS, LoRAConfig

if TYPE_CHECKING:
    from xray_runtime.kernel.config.section import RuntimeConfig


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
        check_trained_part(self.lora, self.trainable_layers, self.engine, "engine")
        if self.lora is not None and self.trainable_layers is not None:
            raise ValueError("lora must be null where trainable_layers is set: train either adapters or whole layers")
        return self


def check_sampled(lora: LoRAConfig | None, generator: GeneratorConfig, runtime: RuntimeConfig) -> None:
    """Raises ValueError if `lora` trains a part of a layer that the generator holds as one, since a transfer from GPU
    to GPU replaces whole layers."""
    if lora is None or runtime.weight_transfer not in ("nccl", "ipc"):
        return
    trained = set(lora.target_modules or LINEAR_LAYERS)
    for fused in generator.capabilities.fused_layers:
        if trained & fused and fused - trained:
            raise ValueError(
                unsupported(
                    f"lora.target_modules: {sorted(trained & fused)} without {sorted(fused - trained)}",
                    f"runtime.weight_transfer = {runtime.weight_transfer!r}",
                    why=f"{generator.engine} holds them as one layer, of which only 'plasma' updates a part",
                )
            )


def unserved(lora: LoRAConfig, generator: GeneratorConfig) -> str | None:
    """Why `generator` cannot compute these adapters beside the frozen weights; None: it can."""
    what = f"generator.engine = {generator.engine!r}"
    if lora.quantize is not None:
        named = f"lora.quantize = {lora.quantize!r}"
        return unsupported(named, "adapter_sync = 'adapter'", why="below the adapter are other weights than the base's")
    if generator.rounds_weights:
        why = "adapters are trained beside the weights as they are"
        return unsupported("adapter_sync = 'adapter'", "generator.quantization", why=why)
    if not can(generator.capabilities, "adapters"):
        return unsupported("adapter_sync = 'adapter'", what, able(GENERATORS, "adapters"))
    if lora.dora and not can(generator.capabilities, "dora"):
        return unsupported("lora.dora with adapter_sync = 'adapter'", what, able(GENERATORS, "dora"))
    if EXPERTS in (lora.target_modules or ()) and not can(generator.capabilities, "expert_adapters"):
        named = "lora.target_modules: experts with adapter_sync = 'adapter'"
        return unsupported(named, what, able(GENERATORS, "expert_adapters"))
    if lora.rank > generator.capabilities.adapter_rank:
        most = f"it computes at most {generator.capabilities.adapter_rank}"
        return unsupported(f"lora.rank = {lora.rank} with adapter_sync = 'adapter'", what, why=most)
    return None


def check_trained_part(lora: LoRAConfig | None, layers: int | None, engine: EngineConfig, name: str) -> None:
    """Raises ValueError if `engine`, the field `name`, cannot train adapters alone, or the top `layers` alone."""
    if lora is not None:
        engine.require("lora", "lora", name)
        if lora.quantize is not None:
            engine.require("quantized", f"lora.quantize = {lora.quantize!r}", name)
        if engine.tensor_parallel > 1 and engine.pipeline_parallel > 1:
            where = f"{name}.tensor_parallel = {engine.tensor_parallel} and pipeline_parallel > 1 together"
            raise ValueError(unsupported("lora", where, why="some ranks then wait for others without end"))
        numbered = [each for each in lora.target_modules or () if any(part.isdigit() for part in each.split("."))]
        if numbered and engine.pipeline_parallel > 1:
            where = f"{name}.pipeline_parallel = {engine.pipeline_parallel}"
            why = "a stage without adapters has nothing to train: name layers without their numbers"
            raise ValueError(unsupported(f"lora.target_modules: {numbered}", where, why=why))
        if lora.quantize is not None and engine.tensor_parallel > 1:
            where = f"{name}.tensor_parallel = {engine.tensor_parallel}"
            raise ValueError(unsupported(f"lora.quantize = {lora.quantize!r}", where, why="its blocks are not split"))
    if layers is not None:
        feature = f"trainable_layers = {layers}"
        engine.require("trainable_layers", feature, name)
        if engine.pipeline_parallel > 1:
            where = f"{name}.pipeline_parallel = {engine.pipeline_parallel}"
            raise ValueError(unsupported(feature, where, why="a frozen trunk is computed once, not in a pipeline"))
        if engine.sequence_parallel > 1:
            where = f"{name}.sequence_parallel = {engine.sequence_parallel}"
            raise ValueError(unsupported(feature, where, why="the states of a frozen trunk are kept whole"))
