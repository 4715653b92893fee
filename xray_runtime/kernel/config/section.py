"""The base of every part of a config, and its kinds of numbers."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A frozen part of the config: no unknown keys, no silent coercion."""

    # Built when the first value is read: a run reads few of the sections that it imports, most as a part of another.
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    gives_rewards: ClassVar[bool] = False
    """Whether what it configures gives rewards itself, as an environment does."""
    not_in_key: ClassVar[frozenset[str]] = frozenset()
    """Fields that cannot change a result, such as an address; the keys of stages leave them out."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """With the meanings of the fields, which pydantic would read from the source of each class that is imported."""
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).get("properties", {})
        for field, content in properties.items():
            if text := field_meaning(cls, field):
                content["description"] = text
        return described

    def plugs(self) -> tuple[str, ...]:
        """Modules of the plugs that this section chooses: keys of stages digest their code."""
        return ()

    @property
    def called_functions(self) -> Sequence[str]:
        """The functions that it calls: `module:function`, or names of functions that a graph passed directly."""
        return ()

    @property
    def outside_fields(self) -> Mapping[str, str]:
        """Fields that name files, directories or hub repositories → their values; see `StageKind.outside`."""
        return {}

    @property
    def row_columns(self) -> Sequence[str] | None:
        """Columns of the rows of a dataset that a stage with this config makes; None: they are not known before."""
        return None

    def check_call(
        self, path: str, functions: Mapping[str, Callable[..., Any]], columns: Collection[str] | None
    ) -> None:
        """Raises ValueError if the environment forbids what it runs, or a function takes what it cannot be given.

        Args:
            path: its dotted path in the stage's config.
            functions: functions that the graph passed directly, by name.
            columns: those of the stage's dataset; None: they are not known yet.
        """

    def resolved(self, device: str) -> Self:
        """The section with the values that `auto` means on `device` ("cpu" or "cuda"), also in the sections in it."""
        fields = {name: _resolved(getattr(self, name), device) for name in type(self).model_fields}
        return self.model_copy(update=fields)

    def check_runtime(self, runtime: RuntimeConfig, path: str) -> None:
        """Raises ValueError if the section, at a dotted `path` in a stage's config, conflicts with `runtime`; the
        message begins with a field."""

    def check_services(self, runtime: RuntimeConfig) -> None:
        """Raises ValueError if a service that this section names does not answer; the message begins with a field.
        Asked before a run computes anything."""


def field_meaning(section: type[BaseModel], field: str) -> str:
    """The text below a field in the source of the class that declares it last."""
    declaring = next((each for each in section.__mro__ if field in vars(each).get("__annotations__", {})), None)
    return _field_texts(declaring).get(field, "") if declaring is not None else ""


@cache
def _field_texts(section: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    except (OSError, TypeError, SyntaxError):  # a class without a source
        return {}
    texts = dict[str, str]()
    for declared, below in pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        match declared, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def sections(value: object, path: str = "") -> Iterator[tuple[str, Section]]:
    """(dotted path, section) of `value` itself and of every section in it, however deep."""
    below = f"{path}." if path else ""
    if isinstance(value, BaseModel):
        if isinstance(value, Section):
            yield path, value
        for name in type(value).model_fields:
            yield from sections(getattr(value, name), f"{below}{name}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from sections(item, f"{below}{number}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from sections(item, f"{below}{key}")


def _resolved(value: Any, device: str) -> Any:
    if isinstance(value, Section):
        return value.resolved(device)
    if isinstance(value, list):
        return [_resolved(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(item, device) for key, item in value.items()}
    return value


class ValidationSchedule(Section):
    """How often a model is validated during training, and which version the stage publishes."""

    every: Count = 20
    """Steps between validations; one more follows the last step."""
    keep: Literal["best", "last"] = "best"
    """The version to publish: the one with the best validation result, or the last."""

    def is_due(self, done: int, steps: int) -> bool:
        """Whether to validate after `done` of `steps`."""
        return done == steps or done % self.every == 0


class RuntimeConfig(Section):
    """Where and how the work runs. `device` and `threads`, and on CUDA `reproducible` and `tf32`, are in every stage
    key; nothing else changes a result."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA if it is present."""
    reproducible: bool = False
    """CUDA only (a CPU always is): the same bits from the same run on the same GPUs. Sets deterministic kernels in
    torch, cuBLAS and cuDNN, one algorithm in NCCL, and vLLM's batch-invariant kernels. Training becomes slower,
    sampling much slower; an operator without a deterministic form fails."""
    tf32: bool = False
    """CUDA only: round the factors of float32 products to 10 bits, which is several times faster. Products in bfloat16
    are not affected."""
    threads: Annotated[int, Field(ge=1, le=256)] = 2
    """CPU threads of a Workhorse whose model works alone. Models that work at the same time (all that score a rollout;
    policy and separate critic) share them equally, rounded down, at least one each. With a PPO stage's `lag: 1` the
    generator counts as one of these models but keeps all `threads`. The number of threads changes float rounding."""
    niceness: Annotated[int, Field(ge=0, le=19)] = 0
    """Niceness of the run's processes on a busy machine: 0 gives them the same share of a core as other programs, 10
    about a tenth of it. A cluster of your own may use a higher value (`RAY_worker_niceness` when its Ray was started;
    Ray's default is 15)."""
    cpus_per_workhorse: NonNegative = 0.2
    """Ray CPUs that one Workhorse reserves. Below 1 several share a core, which suits a laptop but not a cluster."""
    gpus_per_workhorse: NonNegative = 1.0
    """GPUs of one Workhorse on CUDA. Below 1 the models of a stage share GPUs: one half lets two models use each GPU.
    The stage reserves whole GPUs, and no GPU has two ranks of one model."""
    generator_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of copies of the generator; each prompt goes to the least loaded. On CPU replies do not depend on it."""
    generator_sleeps: bool = False
    """CUDA and vLLM only: between rollouts, move the generator's weights to host memory and free its GPU memory for
    models on the same GPU."""
    trainer_sleeps: bool = False
    """CUDA only: while replies are sampled, move the weights and optimizer states of trained models to host memory and
    free their GPU memory for the generator."""
    weight_transfer: Literal["auto", "plasma", "nccl", "ipc"] = "auto"
    """How the trainer sends weights to the generator. `plasma`: shared memory on one machine, else Ray's object store;
    `ipc`: CUDA IPC on the same GPUs; `nccl`: between GPUs (both vLLM only). `auto`: `ipc` or `nccl` where both models
    are on GPUs, no rank holds a part of the policy, and whole layers are trained; else `plasma`."""
    parallel: Literal["as_written", "auto"] = "as_written"
    """`auto`: the planner's memory model chooses every layout, and on CUDA the shares of a GPU, for the cluster when a
    stage is called; the stage's record shows them."""
    storage: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\s?#]+$")] | None = None
    """URL of a store that several machines share (`s3://BUCKET/PREFIX`, `file:///PATH`, or any other fsspec URL).
    Checkpoints, snapshots, records and results are also written there, and fetched from there instead of computed
    again."""
    mirror: Literal["none", "tensorboard", "wandb"] = "none"
    """`tensorboard`: metrics also become event files, in `records/STAGE-KEY/tensorboard` (`pip install
    xray-rlhf[tensorboard]`). `wandb`: an offline run in `records/STAGE-KEY/wandb`, which needs neither network nor
    login, and which `wandb sync` uploads (`pip install xray-rlhf[wandb]`)."""
    wait_timeout_s: Positive = 600.0
    """How long a stage waits for devices that other runs use; stages of one run wait for each other without a limit. A
    request that exceeds the cluster fails at once."""
    hang_timeout_s: Annotated[float, Field(ge=5.0)] = 120.0
    """A Workhorse without a heartbeat for this long is replaced, and its stage continues from its snapshot. This limit
    and those below grow with the load if more programs run than there are cores."""
    collective_timeout_s: Annotated[float, Field(ge=5.0)] = 600.0
    """A rank that lets its peers wait longer for it in a collective is replaced, and its stage continues from a
    snapshot. Allow as much as one rank may need to work alone. torch has its own limit of thirty minutes."""
    generator_memory_gib: Annotated[float, Field(ge=0.25)] = 1.0
    """Largest size of vLLM's KV cache on CPU."""
    gpu_memory_fraction: Fraction = 0.4
    """Share of a GPU that vLLM may use on CUDA."""
    max_num_seqs: Annotated[int, Field(ge=1, le=16_384)] | None = None
    """Sequences that one replica of the generator samples at a time, on CUDA with vLLM, whose option this is; None:
    vLLM's default. `parallel: auto` sets the number for which it planned the KV cache and the sampler."""
    snapshot_every: Count = 10
    """Steps (SFT, reward model) or iterations (PPO) between snapshots, from which an interrupted stage continues. There
    are fewer if they would take more than 4% of a stage's time."""
    snapshot_every_s: Annotated[float, Field(ge=1.0)] = 1800.0
    """Seconds after which a snapshot is due even if fewer steps were made; the 4% hold here too."""
    on_out_of_memory: Literal["halve", "fail"] = "halve"
    """`halve`: a stage that runs out of memory continues with micro-batches of half the size and the same global batch;
    results differ only in float rounding. `fail`: the stage fails."""
    micro_batch_divisor: Annotated[int, Field(ge=1, le=64)] = 1
    """Divides every engine's micro_batch_tokens; `halve` doubles it."""
    retries: Annotated[int, Field(ge=0, le=20)] = 1
    """Retries after a stage fails with an ordinary error."""
    retry_delay_s: NonNegative = 2.0
    restarts: Annotated[int, Field(ge=0, le=100)] = 3
    """Restarts of the whole run after its driver or Ray was lost; each continues from finished stages and snapshots."""
    stall_timeout_s: Annotated[float, Field(ge=10.0)] = 1800.0
    """A run without progress for this long is killed and restarted. A micro-batch or a step of generation is progress
    too."""

    def in_keys(self) -> dict[str, Any]:
        """The fields that change results; they are in every stage key."""
        fields: dict[str, Any] = {"device": self.device, "threads": self.threads}
        return fields | ({"reproducible": self.reproducible, "tf32": self.tf32} if self.device == "cuda" else {})

    @model_validator(mode="after")
    def _fits_the_device(self) -> Self:
        if self.trainer_sleeps and self.device == "cpu":
            raise ValueError("trainer_sleeps = True needs device 'cuda'")
        return self

    @model_validator(mode="after")
    def _chosen_once(self) -> Self:
        for field in ("gpus_per_workhorse", "gpu_memory_fraction", "max_num_seqs"):
            if self.parallel == "auto" and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(
                    f"{field} = {getattr(self, field)} must be left out with parallel = 'auto', which chooses it"
                )
        return self

    @field_validator("storage")
    @classmethod
    def _others_can_open_it(cls, url: str | None) -> str | None:
        if url is not None and re.search(r"://[^/]*:[^/]*@", url):
            raise ValueError("a password is not allowed in the URL: credentials come from the environment")
        if url is not None and re.match(r"memory:|file://[^/]", url):
            raise ValueError(f"{url!r} is not allowed: must be reachable from other processes (file:///ABSOLUTE/PATH)")
        return url
