"""What a training loop sees of a WholeModel: typed calls, each of which returns a reference to its answer.

A loop written against these runs over Ray actors, and in a test over plain objects.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from xray_runtime.engines.generation.sampling import Sampling
    from xray_runtime.weights.object_store import WeightUpdate
    from xray_runtime.workers.rows import Rows

T = TypeVar("T")


class Ref(Generic[T]):
    """A reference to an answer of type T: `ray.ObjectRef`."""


class Score(Protocol):
    def remote(self, rows: Rows, width: int = 0) -> Ref[Rows]: ...


class Train(Protocol):
    def remote(self, rows: Rows, totals: dict[str, float], lr: float) -> Ref[dict[str, float]]: ...


class Generate(Protocol):
    def remote(self, rows: Rows, sampling: Sampling, version: int) -> Ref[Rows]: ...


class Follow(Protocol):
    def remote(self, policy: Any, version: int) -> Ref[None]: ...


class LoadWeights(Protocol):
    def remote(self, update: WeightUpdate) -> Ref[int]: ...


class Save(Protocol):
    def remote(self, directory: Path, head_file: str | None = None) -> Ref[None]: ...


class InDirectory(Protocol):
    def remote(self, directory: Path) -> Ref[None]: ...


class NoArguments(Protocol):
    def remote(self) -> Ref[None]: ...


class ModelHandle(Protocol):
    """A WholeModel: see `whole_model.WholeModel` for what each call does."""

    @property
    def score(self) -> Score: ...
    @property
    def train(self) -> Train: ...
    @property
    def generate(self) -> Generate: ...
    @property
    def follow(self) -> Follow: ...
    @property
    def load_weights(self) -> LoadWeights: ...
    @property
    def save(self) -> Save: ...
    @property
    def save_state(self) -> InDirectory: ...
    @property
    def load_state(self) -> InDirectory: ...
    @property
    def sleep(self) -> NoArguments: ...
    @property
    def wake_up(self) -> NoArguments: ...
