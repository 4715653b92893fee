"""The arguments of a stage's body: its config, inputs, models and kept files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.store.seal import Seal, process_seal

if TYPE_CHECKING:
    from xray_runtime.cluster.generator_spec import GeneratorSpec
    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.cluster.protocols import ModelHandle
    from xray_runtime.kernel.store.shared import SharedFolder


C = TypeVar("C")


I = TypeVar("I")  # noqa: E741


class OpenModels(Protocol):
    """Starts one WholeModel per role, all at the same time; stops them all at the end of the block."""

    def __call__(
        self, specs: Mapping[str, ModelSpec | GeneratorSpec]
    ) -> AbstractContextManager[dict[str, ModelHandle]]: ...


@dataclass(frozen=True)
class Stage(Generic[C, I]):
    """Everything that a stage body may depend on."""

    name: str
    seed: int
    config: C
    inputs: I
    runtime: RuntimeConfig
    open_models: OpenModels
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions that were passed as objects, by name."""
    kept: Path | None = None
    """A directory that outlives the attempt, next to the snapshots, until the stage is published."""
    kept_shared: SharedFolder | None = None
    """The same in the shared store, for attempts on other machines."""
    seal: Seal = field(default_factory=process_seal)
    """Kept files are read only if they carry this seal."""
    too_long: Callable[[ModelSpec, int], str | None] = lambda spec, tokens: None
    """Why a model cannot train on a row of so many tokens, in words that follow the row's name; None: it can. Called
    before models are opened."""
