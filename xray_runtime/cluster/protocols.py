"""Typed handles of Ray actors: each call returns a `Ref` to its answer, and `get` waits for it.

Any object with these methods can replace an actor: a training loop written against `ModelHandle` runs over WholeModels,
and in tests over plain objects whose answers are `Ready`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    import numpy as np

    from xray_runtime.cluster.generator_spec import GeneratorSpec
    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.cluster.types import Heartbeat, RankInfo, WorkerInfo
    from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, StepTotals, TextBatch
    from xray_runtime.data.columnar import ColumnBatch
    from xray_runtime.engines.sampling import Sampling
    from xray_runtime.engines.sync.object_store import WeightUpdate
    from xray_runtime.engines.sync.route import Device, Route
    from xray_runtime.kernel.config.section import RuntimeConfig

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B", bound="ColumnBatch")
T_co = TypeVar("T_co", covariant=True)
Tried: TypeAlias = tuple[str, list[float]]
"""Precision of a trained model's passes, and its log-probabilities of a few tokens; none from ranks without them."""


class Ref(Generic[T_co]):
    """A reference to a possibly pending answer: `ray.ObjectRef`, `Ready` or `Local`."""


@dataclass(frozen=True)
class Ready(Ref[T_co]):
    """The answer of an object in this process."""

    value: T_co


@dataclass(frozen=True)
class Local(Ref[T_co]):
    """An answer that a thread of this process computes."""

    future: Future[T_co]


def get(ref: Ref[T]) -> T:
    """Wait for an answer. Raises the exception of the call."""
    if isinstance(ref, Ready):
        return ref.value
    if isinstance(ref, Local):
        return ref.future.result()
    import ray

    answer: T = ray.get(ref)
    return answer


def get_all(refs: Sequence[Ref[T]]) -> list[T]:
    """Wait for several answers, in order. Raises the first exception of the calls at once."""
    of_actors = [ref for ref in refs if not isinstance(ref, Ready | Local)]
    if not of_actors:
        return [get(ref) for ref in refs]
    import ray

    answers = iter(ray.get(of_actors))
    return [get(ref) if isinstance(ref, Ready | Local) else next(answers) for ref in refs]


@dataclass(frozen=True)
class Scattered(Generic[B]):
    """A batch in shards, one a replica."""

    shards: list[B | Ref[B] | None]
    """The rows, or a reference to them; None: the replica has none."""
    places: list[np.ndarray]
    """Indices of each shard's rows in the batch."""

    def shard(self, number: int) -> B:
        """A shard as an argument of a call: an actor gets the rows in place of a reference to them."""
        return cast("B", self.shards[number])


class RemoteMethod(Protocol[P, T_co]):
    """A method of an actor. `remote` returns at once; the actor runs its calls one after the other."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Ref[T_co]: ...


class Pingable(Protocol):
    """An actor whose death can be detected."""

    ping: RemoteMethod[[], None]


class ExportWeights(Protocol):
    def remote(
        self, version: int, shared: bool = False, dtype: str | None = None, merged: bool = True
    ) -> Ref[WeightUpdate]: ...


class Save(Protocol):
    def remote(self, directory: Path, head_file: str | None = None) -> Ref[None]: ...


class Sleep(Protocol):
    def remote(self, synced_next: bool = False) -> Ref[None]: ...


class _WithoutRows(Protocol):
    """The calls that take no rows."""

    load_weights: RemoteMethod[[WeightUpdate], int]
    load_checkpoint: RemoteMethod[[Path, int], None]
    readings: RemoteMethod[[], dict[str, float]]
    save: Save
    save_state: RemoteMethod[[Path], None]
    check_state: RemoteMethod[[Path], str | None]
    load_state: RemoteMethod[[Path], None]
    sleep: Sleep
    wake_up: RemoteMethod[[], None]
    release_memory: RemoteMethod[[], None]


class ModelHandle(_WithoutRows, Protocol):
    """A WholeModel as a training loop sees it; `whole_model.WholeModel` documents the calls."""

    score: RemoteMethod[[TextBatch], Scores]
    reference: RemoteMethod[[TextBatch], Scores]
    train: RemoteMethod[[TextBatch, StepTotals, float], dict[str, float]]
    generate: RemoteMethod[[PromptBatch, Sampling, int], ReplyBatch]
    follow: RemoteMethod[[ModelHandle, int], str | None]


class WholeModelHandle(_WithoutRows, Protocol):
    """All calls of a WholeModel itself: of its `handles.ModelProxy`, of `opening` and of other WholeModels."""

    score: RemoteMethod[[Scattered[TextBatch]], Scores]
    reference: RemoteMethod[[Scattered[TextBatch]], Scores]
    begin_train: RemoteMethod[[Scattered[TextBatch], StepTotals, float], int]
    end_train: RemoteMethod[[int], dict[str, float]]
    generate: RemoteMethod[[Scattered[PromptBatch], Sampling, int], ReplyBatch]
    follow: RemoteMethod[[WholeModelHandle, int], str | None]
    ping: RemoteMethod[[], None]
    build: RemoteMethod[
        [str, RuntimeConfig, Path, ModelSpec | GeneratorSpec, list[WorkhorseHandle], int, str, str], list[WorkerInfo]
    ]
    unload: RemoteMethod[[bool], None]
    where: RemoteMethod[[], list[Device]]
    export_weights: ExportWeights
    whole_weight_names: RemoteMethod[[], set[str] | None]
    send_weights: RemoteMethod[[int, Route, list[WorkhorseHandle], int], None]


class HeartbeatMethod(Protocol):
    def options(self, *, concurrency_group: str) -> RemoteMethod[[], Heartbeat]: ...


class WorkhorseHandle(Protocol):
    heartbeat: HeartbeatMethod
    worker_info: RemoteMethod[[], WorkerInfo]
    where: RemoteMethod[[], Device]
    rendezvous: RemoteMethod[[], tuple[str, int]]
    unload: RemoteMethod[[], None]
    load_libraries: RemoteMethod[[str], None]
    build: RemoteMethod[[ModelSpec | GeneratorSpec, RankInfo], None]

    # Files
    sees: RemoteMethod[[Path], bool]
    make_directory: RemoteMethod[[], Path]
    append_chunk: RemoteMethod[[Path, bytes], None]
    sizes: RemoteMethod[[Path], dict[str, int]]
    read_chunk: RemoteMethod[[Path, int], bytes]
    remove_directory: RemoteMethod[[Path], None]
    remove_directories: RemoteMethod[[], None]

    # Learner
    release_memory: RemoteMethod[[], None]
    score: RemoteMethod[[TextBatch], Scores]
    reference: RemoteMethod[[TextBatch], Scores]
    train: RemoteMethod[[TextBatch, StepTotals, float], dict[str, float]]
    export_weights: RemoteMethod[[int, bool, str | None, bool], WeightUpdate]
    weight_names: RemoteMethod[[], set[str]]
    send_weights: RemoteMethod[[int, Route, tuple[str, int], list[WorkhorseHandle], int], None]
    begin_save: RemoteMethod[[Path, int, int], None]
    save: RemoteMethod[[Path, str | None], dict[str, str]]
    tried_logprobs: RemoteMethod[[], Tried]
    check_saved: RemoteMethod[[Path, str | None, dict[str, str], Tried], None]
    finish_save: RemoteMethod[[Path, int, int], dict[str, str]]
    save_state: RemoteMethod[[Path], None]
    check_state: RemoteMethod[[Path, int, int], str | None]
    load_state: RemoteMethod[[Path], None]

    # Either
    sleep: RemoteMethod[..., None]
    wake_up: RemoteMethod[[], None]

    # Generator
    layers_of: RemoteMethod[[set[str]], set[str]]
    generate: RemoteMethod[[PromptBatch, Sampling, int], ReplyBatch]
    verify_weights: RemoteMethod[[WeightUpdate, int, int], None]
    load_weights: RemoteMethod[[WeightUpdate, bool], int]
    load_checkpoint: RemoteMethod[[Path, int], None]
    readings: RemoteMethod[[], dict[str, float]]
    revert_weights: RemoteMethod[[], None]
    receive: RemoteMethod[[str, dict[str, Any], int], None]
