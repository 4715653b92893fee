"""How models are placed and computed: the fields that every trainer and every generator has.

A field of type `EngineConfig` or `GeneratorConfig` takes the config of any plug; a plug's own fields stand in its own
file.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from xray_runtime.engines.capabilities import GeneratorCapabilities, TrainerCapabilities, can, unsupported
from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.plugs import Registry

if TYPE_CHECKING:
    from xray_runtime.kernel.config.section import RuntimeConfig

Precision = Literal["auto", "float32", "bfloat16"]
S = TypeVar("S", bound=BaseModel)


class TrainerPlug(Protocol):
    """A trainer, as configs know it; `engines.trainer.Trainer` says the rest."""

    @property
    def config(self) -> type[EngineConfig]: ...

    @property
    def capabilities(self) -> TrainerCapabilities: ...


class GeneratorPlug(Protocol):
    """A generator, as configs know it; `engines.generator.Generator` says the rest."""

    @property
    def config(self) -> type[GeneratorConfig]: ...

    @property
    def capabilities(self) -> GeneratorCapabilities: ...


TRAINERS: Registry[TrainerPlug] = Registry("library", "xray_runtime.engines.trainers", "TRAINER", "xray.trainers")
GENERATORS: Registry[GeneratorPlug] = Registry(
    "engine", "xray_runtime.engines.generators", "GENERATOR", "xray.generators"
)


class PlugSection(Section):
    """The config of a plug. The class that has a `registry` stands for the config of any of its plugs: as the type of a
    field, and as a function that makes one."""

    # The plugs are loaded when the first field of this type is declared, or the first config is read.
    model_config = ConfigDict(defer_build=True)

    registry: ClassVar[Registry[Any]]
    tag: ClassVar[str]
    """The field that names the plug."""
    default: ClassVar[str]
    """The plug where the field is left out."""

    def __new__(cls, *args: object, **fields: object) -> Self:
        chosen: type[Self] = cls
        if "registry" in vars(cls):
            chosen = cls.registry.get(str(fields.get(cls.tag, cls.default))).config
        return super().__new__(chosen)

    @classmethod
    def members(cls) -> list[type[PlugSection]]:
        """The configs of all plugs, or the class itself if it is one."""
        return [cls.registry.get(name).config for name in cls.registry] if "registry" in vars(cls) else [cls]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /) -> CoreSchema:
        if "registry" not in vars(cls):
            return handler(source)
        union: Any = Union[tuple(cls.members())]  # noqa: UP007
        named = BeforeValidator(lambda value: {cls.tag: cls.default, **value} if isinstance(value, dict) else value)
        return handler.generate_schema(Annotated[union, Field(discriminator=cls.tag), named])

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """As validation: the tag may be left out, so that a config may be one of several plugs."""
        found = handler(schema)
        return {"anyOf": found["oneOf"]} if "oneOf" in found else found

    @classmethod
    def lacks(cls, field: str) -> str | None:
        """The line that refuses a field which only other plugs have; None: no plug has it."""
        having = [name for name in cls.registry if field in cls.registry.get(name).config.model_fields]
        return unsupported(field, f"{cls.tag} = {cls.model_fields[cls.tag].default!r}", having) if having else None

    @property
    def name(self) -> str:
        """The plug's name."""
        return str(getattr(self, self.tag))

    def plugs(self) -> tuple[str, ...]:
        return (self.registry.module(self.name),)

    def require(self, capability: str, feature: str, field: str = "", value: object = True, why: str = "") -> None:
        """Raises ValueError unless the plug has the `capability` that `feature`, a field and its value, needs.

        Args:
            field: the path of this section.
            value: where the capability is several things, the one that is needed.
            why: the end of the line.
        """
        if not can(self.registry.get(self.name).capabilities, capability, value):
            where = f"{field}{field and '.'}{self.tag} = {self.name!r}"
            raise ValueError(unsupported(feature, where, able(self.registry, capability, value), why))


def able(registry: Registry[Any], capability: str, value: object = True) -> list[str]:
    """Names of the plugs that have a capability."""
    return [name for name in registry if can(registry.get(name).capabilities, capability, value)]


class LayoutConfig(Section):
    """The parallel layout of one model: tensor × pipeline × data parallel Workhorses."""

    num_workhorses: Annotated[int, Field(ge=1, le=1024)] = 1
    """Workhorses (one device each) of the whole model: tensor_parallel × pipeline_parallel × data-parallel ranks."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of Workhorses that share each layer's matrices."""
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
    def libraries(self) -> str:
        """Libraries that the processes of its Workhorses import; see `cluster.pool.libraries`."""
        return f"trainer:{getattr(self, 'library', EngineConfig.default)}"

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel replicas."""
        return self.num_workhorses // (self.tensor_parallel * self.pipeline_parallel)

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


class FrozenConfig(LayoutConfig):
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
        for field in ("tensor_parallel", "pipeline_parallel"):
            if getattr(self, field) > 1:
                needed[field] = f"{field} = {getattr(self, field)}"
        for capability, feature in needed.items():
            if not can(TRAINERS.get(self.library).capabilities, capability):
                raise ValueError(unsupported(feature, f"library = {self.library!r}", able(TRAINERS, capability)))
        self.check_sharding(self.zero_stage, (0,))
        return self

    def plugs(self) -> tuple[str, ...]:
        return (TRAINERS.module(self.library),) if self.is_split or self.zero_stage else ()

    def automatic_precision(self, device: str) -> Literal["float32", "bfloat16"]:
        """The meaning of `auto` on `device` ("cpu" or "cuda")."""
        return "bfloat16" if device == "cuda" else "float32"


class EngineConfig(LayoutConfig, PlugSection):
    """How one model is trained. Each trainer has further fields, which stand in its own file."""

    registry = TRAINERS
    tag, default = "library", "deepspeed"

    library: str = "deepspeed"
    """The trainer."""
    micro_batch_tokens: Annotated[int, Field(ge=16)] = 4096
    """Padded tokens in one forward pass. It changes memory, not results."""
    precision: Precision = "auto"
    """`bfloat16`: mixed precision. Passes run in bfloat16; gradients are summed and weights updated and saved in
    float32. `auto`: `bfloat16` on CUDA, and `float32` on CPU and where the trainer needs it."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass: less memory, bit-identical results."""

    @model_validator(mode="after")
    def _supported(self) -> Self:
        for field in ("tensor_parallel", "pipeline_parallel", "activation_checkpointing"):
            if getattr(self, field) != EngineConfig.model_fields[field].default:
                self.require(field, f"{field} = {getattr(self, field)}")
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

    def automatic_precision(self, device: str) -> Literal["float32", "bfloat16"]:
        """The meaning of `auto` on `device` ("cpu" or "cuda")."""
        return "bfloat16" if device == "cuda" else "float32"

    def check_written(self) -> None:
        """Raises ValueError if fields conflict that `runtime.parallel: auto` may still change."""

    def check_device(self, device: str, path: str) -> None:
        """Raises ValueError if `device` ("cpu" or "cuda") does not support a field of this section, which is at
        `path`."""
        if device == "cuda":
            return
        for field, allowed in self.capabilities.on_cpu.items():
            if (value := getattr(self, field)) not in allowed:
                raise ValueError(unsupported(f"{path}.{field} = {value!r}", f"library = {self.library!r} on CPU"))


def with_precision(section: S, device: str) -> S:
    """`section` with the precision that `auto` means on `device` ("cpu" or "cuda"), however deep in it."""
    found = {name: _with_precision(getattr(section, name), device) for name in type(section).model_fields}
    if isinstance(section, FrozenConfig | EngineConfig) and section.precision == "auto":
        found["precision"] = section.automatic_precision(device)
    return section.model_copy(update=found)


def _with_precision(value: Any, device: str) -> Any:
    if isinstance(value, BaseModel):
        return with_precision(value, device)
    if isinstance(value, list):
        return [_with_precision(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _with_precision(item, device) for key, item in value.items()}
    return value


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

    def check_runtime(self, runtime: RuntimeConfig) -> None:
        """Raises ValueError if the generator cannot do what `runtime` asks of it."""
        direct = runtime.weight_transfer in ("nccl", "ipc")
        for capability, value, field in (
            ("transports", runtime.weight_transfer, "weight_transfer" if direct else None),
            ("sleep", True, "generator_sleeps" if runtime.generator_sleeps else None),
        ):
            if field is not None:
                feature = f"runtime.{field} = {getattr(runtime, field)!r}"
                self.require(capability, feature, "generator", value)
                if runtime.device == "cpu":
                    raise ValueError(unsupported(feature, "runtime.device = 'cpu'", why="it needs 'cuda'"))

    def precision(self, device: str) -> Literal["float32", "bfloat16"]:
        """The precision of weights and activations on `device` ("cpu" or "cuda")."""
        return "bfloat16" if self.capabilities.bfloat16_on_gpu and device == "cuda" else "float32"
