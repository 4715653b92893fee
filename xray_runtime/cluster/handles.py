"""The caller's side of a WholeModel: rows go to its Workhorses past it, by reference.

The caller cuts a batch into one shard a replica and puts large shards into the object store. The WholeModel hands the
references on, and each Workhorse reads its own shard; no row enters the WholeModel's memory. Small shards travel inside
the call, which is faster than an object of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import numpy as np
import ray

from xray_runtime.cluster.protocols import ModelHandle, Ref, Scattered, WholeModelHandle
from xray_runtime.data.batch import PromptBatch, TextBatch
from xray_runtime.data.columnar import ColumnBatch
from xray_runtime.data.ragged import balance
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.topology import Topology

if TYPE_CHECKING:
    from xray_runtime.data.batch import ReplyBatch, Scores, StepTotals
    from xray_runtime.engines.layouts import LayoutConfig
    from xray_runtime.engines.sampling import Sampling

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B", bound=ColumnBatch)

INLINE_BYTES = 100 * 1024
"""Shards of at most so many bytes travel inside the call: Ray keeps no object of its own for such arguments either."""


@dataclass(frozen=True)
class _Call(Generic[P, T]):
    remote: Callable[P, Ref[T]]


class ModelProxy:
    """A `ModelHandle`. Calls without rows are those of the WholeModel itself.

    Args:
        layout: of the model, which says how many replicas share the rows.
        num_replicas: of a generator.
    """

    def __init__(
        self, model: WholeModelHandle, role: str, layout: LayoutConfig | GeneratorConfig, num_replicas: int
    ) -> None:
        self.model, self._role = model, role
        self._replicas = num_replicas if isinstance(layout, GeneratorConfig) else Topology.of(layout).data
        self.score, self.reference = _Call(self._score), _Call(self._reference)
        self.train, self.generate, self.follow = _Call(self._train), _Call(self._generate), _Call(self._follow)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _score(self, rows: TextBatch) -> Ref[Scores]:
        return self.model.score.remote(self._scattered(rows))

    def _reference(self, rows: TextBatch) -> Ref[Scores]:
        return self.model.reference.remote(self._scattered(rows))

    def _train(self, rows: TextBatch, totals: StepTotals, lr: float) -> Ref[dict[str, float]]:
        """Steps may be begun while earlier ones run; any other call only once all have answered."""
        begun = self.model.begin_train.remote(self._scattered(rows), totals, lr)
        return self.model.end_train.remote(cast("int", begun))  # Ray reads it

    def _generate(self, rows: PromptBatch, sampling: Sampling, version: int) -> Ref[ReplyBatch]:
        """Prompts are spread by predicted tokens."""
        loads = balance(rows.input_ids.lengths + sampling.max_new_tokens, self._replicas)
        prompts = _sharded(rows, [np.array(load, np.int64) for load in loads])
        return self.model.generate.remote(prompts, sampling, version)

    def _follow(self, policy: ModelHandle, version: int) -> Ref[str | None]:
        return self.model.follow.remote(cast("ModelProxy", policy).model, version)

    def _scattered(self, rows: TextBatch) -> Scattered[TextBatch]:
        if len(rows) < self._replicas:
            raise ValueError(f"{self._role}: {len(rows)} rows are too few for {self._replicas} replicas")
        return _sharded(rows.on_wire(), rows.shard_places(self._replicas))


def _sharded(rows: B, places: Sequence[np.ndarray]) -> Scattered[B]:
    shards: list[B | None] = [rows]
    if len(places) > 1:
        shards = [rows.take(rows_of_replica) if len(rows_of_replica) else None for rows_of_replica in places]
    return Scattered([None if shard is None else _parcel(shard) for shard in shards], list(places))


def _parcel(shard: B) -> B | Ref[B]:
    return shard if shard.num_bytes <= INLINE_BYTES else ray.put(shard)
