"""How models are placed and computed: the fields that every trainer and every generator has.

A field of type `EngineConfig` or `GeneratorConfig` takes the config of any plug; a plug's own fields are in its own
file.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, Self

from pydantic import Field, model_validator

from xray_runtime.engines.capabilities import GeneratorCapabilities, TrainerCapabilities
from xray_runtime.kernel.config.plug_section import PlugSection
from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.plugs import Registry, able, can, unsupported

if TYPE_CHECKING:
    from xray_runtime.kernel.config.section import RuntimeConfig

Precision = Literal["auto", "float32", "bfloat16"]


class TrainerPlug(Protocol):
    """A trainer, as configs know it; `engines.trainer.Trainer` says the rest."""

    @property
    def config(self) -> type[EngineConfig]: ...

    @property
    def capabilities(self) -> TrainerCapabilities: ...


class GeneratorPlug(Protocol):
    """A generator, as configs know it; `engines.generator.GenerationEngine` says the rest."""

    @property
    def config(self) -> type[GeneratorConfig]: ...

    @property
    def capabilities(self) -> GeneratorCapabilities: ...


TRAINERS: Registry[TrainerPlug] = Registry("library", "xray_runtime.engines.trainers", "TRAINER", "xray.trainers")
GENERATORS: Registry[GeneratorPlug] = Registry(
    "engine", "xray_runtime.engines.generators", "GENERATOR", "xray.generators"
)


class LayoutConfig(Section):
    """The parallel layout of one model: tensor × pipeline × sequence × data parallel Workhorses."""

    num_workhorses: Annotated[int, Field(ge=1, le=1024)] = 1
    """Workhorses (one device each) of the whole model: tensor_parallel × pipeline_parallel × sequence_parallel ×
    data-parallel ranks."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of Workhorses that share each layer's matrices."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of pipeline stages that share the layers; for models built like Llama."""
    sequence_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of Workhorses that share the tokens of each row, and with them its activations (DeepSpeed Ulysses); must
    divide the model's attention heads. For rows too long for one device. It changes memory and speed, not results."""

    @model_validator(mode="after")
    def _whole_replicas(self) -> Self:
        if self.sequence_parallel > 1 and self.is_split:
            feature, why = f"sequence_parallel = {self.sequence_parallel}", "its Workhorses hold or shard a whole model"
            where = f"tensor_parallel = {self.tensor_parallel} and pipeline_parallel = {self.pipeline_parallel}"
            raise ValueError(unsupported(feature, where, why=why))
        replica = self.tensor_parallel * self.pipeline_parallel * self.sequence_parallel
        if self.num_workhorses % replica:
            degrees = "tensor_parallel × pipeline_parallel" if self.sequence_parallel == 1 else "sequence_parallel"
            raise ValueError(f"num_workhorses = {self.num_workhorses} must be a multiple of {degrees} = {replica}")
        return self

    @property
    def libraries(self) -> str:
        """Libraries that the processes of its Workhorses import; see `cluster.pool.libraries`."""
        return f"trainer:{getattr(self, 'library', EngineConfig.default)}"

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel replicas."""
        return self.num_workhorses // (self.tensor_parallel * self.pipeline_parallel * self.sequence_parallel)

    @property
    def num_copies(self) -> int:
        """Number of Workhorses that hold, or shard, the same weights, and sum their gradients."""
        return self.data_parallel * self.sequence_parallel

    @property
    def is_split(self) -> bool:
        """Whether a Workhorse holds less than a whole replica."""
        return self.tensor_parallel * self.pipeline_parallel > 1

    def check_sharding(self, level: int, levels: Collection[int]) -> None:
        """Raises ValueError if a model that is already split would be sharded at a `level` that is not one of
        `levels`."""
        if self.is_split and level not in levels:
            raise ValueError(
                f"zero_stage = {level} must be at most {max(levels)} with tensor_parallel or pipeline_parallel above 1"
            )


class ComputedConfig(LayoutConfig):
    """The layout and precision of one model."""

    precision: Precision = "auto"

    def automatic_precision(self, device: str) -> Literal["float32", "bfloat16"]:
        """The meaning of `auto` on `device` ("cpu" or "cuda")."""
        return "bfloat16" if device == "cuda" else "float32"

    def resolved(self, device: str) -> Self:
        found = super().resolved(device)
        chosen = {"precision": self.automatic_precision(device)} if self.precision == "auto" else {}
        return found.model_copy(update=chosen)


class FrozenConfig(ComputedConfig):
    """The layout and precision of models that only score."""

    library: str = "deepspeed"
    """The trainer that splits or shards the model; which can, the page of engines says (`scoring`)."""
    zero_stage: Literal[0, 3] = 0
    """3: shard the weights over the data-parallel Workhorses, which gather each layer when they compute it."""
    precision: Precision = "auto"
    """`bfloat16` halves the memory of weights and activations; `auto`: `bfloat16` on CUDA, `float32` on CPU."""

    @model_validator(mode="after")
    def _layout(self) -> Self:
        needed = {"scoring": "a model that only scores"}
        for field in ("tensor_parallel", "pipeline_parallel", "sequence_parallel"):
            if getattr(self, field) > 1:
                needed[field] = f"{field} = {getattr(self, field)}"
        for capability, feature in needed.items():
            if not can(TRAINERS.get(self.library).capabilities, capability):
                raise ValueError(unsupported(feature, f"library = {self.library!r}", able(TRAINERS, capability)))
        self.check_sharding(self.zero_stage, (0,))
        return self

    def plugs(self) -> tuple[str, ...]:
        return (TRAINERS.module(self.library),) if self.is_split or self.zero_stage else ()


class EngineConfig(ComputedConfig, PlugSection):
    """How one model is trained. Each trainer has further fields, in its own file."""

    registry = TRAINERS
    tag, default = "library", "deepspeed"

    library: str = "deepspeed"
    """The trainer."""
    micro_batch_tokens: Annotated[int, Field(ge=16)] = 4096
    """Padded tokens in one forward pass, of which sequence-parallel Workhorses have a share each. It changes memory,
    not results."""
    precision: Precision = "auto"
    """`bfloat16`: mixed precision. Passes run in bfloat16; gradients are summed and weights updated and saved in
    float32. `auto`: `bfloat16` on CUDA, and `float32` on CPU and where the trainer needs it."""
    expert_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of data-parallel Workhorses that share each layer's experts: a token goes to those that hold its own."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass: less memory, bit-identical results."""

    @model_validator(mode="after")
    def _supported(self) -> Self:
        degrees = ("tensor_parallel", "pipeline_parallel", "sequence_parallel", "expert_parallel")
        for field in (*degrees, "activation_checkpointing"):
            if getattr(self, field) != EngineConfig.model_fields[field].default:
                self.require(field, f"{field} = {getattr(self, field)}")
        if self.data_parallel % self.expert_parallel:
            degree, ranks = self.expert_parallel, self.data_parallel
            raise ValueError(f"expert_parallel = {degree} must divide the {ranks} data-parallel Workhorses")
        if self.expert_parallel > 1 and self.sequence_parallel > 1:
            raise ValueError("expert_parallel above 1 is not supported with sequence_parallel above 1")
        if (sharding := self.capabilities.sharding) is not None:
            self.check_sharding(self.sharding_level, sharding.split_levels)
        return self

    @property
    def capabilities(self) -> TrainerCapabilities:
        """Abilities of its trainer."""
        return TRAINERS.get(self.library).capabilities

    @property
    def sharding_level(self) -> int:
        """The states that are sharded over data-parallel ranks, as ZeRO's stages."""
        return 0

    @property
    def least_sharding_level(self) -> int:
        """The lowest level that supports the other fields."""
        return 0

    def offloads(self, device: str) -> bool:
        """Whether optimizer states, and at level 3 weights, are kept elsewhere than in the memory of `device`."""
        return False

    def check_written(self) -> None:
        """Raises ValueError if fields conflict that `runtime.parallel: auto` may still change."""

    def check_runtime(self, runtime: RuntimeConfig, path: str) -> None:
        if runtime.parallel == "as_written":
            try:
                self.check_written()
            except ValueError as error:
                raise ValueError(f"{path}.{error}") from None

    def check_device(self, device: str, path: str) -> None:
        """Raises ValueError if `device` ("cpu" or "cuda") does not support a field of this section, which is at
        `path`."""
        if device == "cuda":
            return
        for field, allowed in self.capabilities.on_cpu.items():
            if (value := getattr(self, field)) not in allowed:
                raise ValueError(unsupported(f"{path}.{field} = {value!r}", f"library = {self.library!r} on CPU"))


def check_one_row_each(engine: LayoutConfig, field: str, rows: int, section: str = "engine") -> None:
    """Raises ValueError if `rows`, the value of `field`, is less than the number of data-parallel ranks of `engine`."""
    replicas = engine.data_parallel
    if rows < replicas:
        name = "num_workhorses" if replicas == engine.num_workhorses else "data_parallel"
        raise ValueError(f"{field} = {rows} must be at least {section}.{name} = {replicas}")


class GeneratorConfig(PlugSection):
    """The engine that samples replies. Libraries and layouts round differently, so all fields are part of the key of
    every stage that samples."""

    registry = GENERATORS
    tag, default = "engine", "vllm"

    engine: str = "vllm"
    """The generator."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of Workhorses that share the model; must divide the model's attention heads."""

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.tensor_parallel > 1:
            self.require("tensor_parallel", f"tensor_parallel = {self.tensor_parallel}")
        return self

    @property
    def capabilities(self) -> GeneratorCapabilities:
        """Abilities of its generator."""
        return GENERATORS.get(self.engine).capabilities

    @property
    def libraries(self) -> str:
        """Libraries that the processes of its Workhorses import; see `cluster.pool.libraries`."""
        return f"generator:{self.engine}"

    def check_runtime(self, runtime: RuntimeConfig, path: str) -> None:
        """Raises ValueError if the generator cannot do what `runtime` asks of it."""
        direct = runtime.weight_transfer in ("nccl", "ipc")
        for capability, value, field in (
            ("transports", runtime.weight_transfer, "weight_transfer" if direct else None),
            ("sleep", True, "generator_sleeps" if runtime.generator_sleeps else None),
        ):
            if field is not None:
                feature = f"runtime.{field} = {getattr(runtime, field)!r}"
                self.require(capability, feature, path, value)
                if runtime.device == "cpu":
                    raise ValueError(unsupported(feature, "runtime.device = 'cpu'", why="it needs 'cuda'"))

    @property
    def rounds_weights(self) -> bool:
        """Whether it computes with other numbers than the weights that it gets."""
        return False

    def precision(self, device: str) -> Literal["float32", "bfloat16"]:
        """The precision of weights and activations on `device` ("cpu" or "cuda")."""
        return "bfloat16" if self.capabilities.bfloat16_on_gpu and device == "cuda" else "float32"
