"""Workhorses that hold no model: they sleep for what a call costs, and answer with rows of the right shapes.

They import no torch, so that many of them fit on one machine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.cluster_sim.cost import Call, Part
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.protocols import Tried
from xray_runtime.cluster.types import Heartbeat, RankInfo
from xray_runtime.cluster.workhorse import Workhorse
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sync.route import Device
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.shards import Piece, Shard, index_path, read_shards, shard_problem
from xray_runtime.ops.planner.disk import SNAPSHOT_BYTES
from xray_runtime.ops.planner.model_states import HALF_BYTES

ELEMENT_BYTES = 4
"""Shards hold float32."""
LOGPROB = np.float32(-2.0)
"""Log-probability of every token, from policy and generator."""


@dataclass(frozen=True)
class Scale:
    """How much smaller the simulation is than the real run."""

    time: float
    """A second of the model costs this many here."""
    tokens: int
    """A row has this many times fewer tokens."""
    parameters: int
    """Weights and snapshots have this many times fewer bytes."""


@dataclass(frozen=True)
class SimSpec:
    """A model's spec with what its calls cost, for a `SimWorkhorse`."""

    spec: ModelSpec | GeneratorSpec
    part: Part
    rollout_size: int
    """Rows of one iteration; of a generator, those of each replica."""
    scale: Scale

    @property
    def layout(self) -> Any:
        return self.spec.layout

    def located(self, find: Callable[[Path], Path]) -> SimSpec:
        return replace(self, spec=self.spec.located(find))


@dataclass(frozen=True)
class SimBucket:
    """A rank's share of the weights, as `Bucket`."""

    ref: Any
    place: int


@dataclass(frozen=True)
class SimUpdate:
    """Weights of a version, as `WeightUpdate`."""

    version: int
    buckets: tuple[SimBucket, ...]
    digest: str = "simulated"


class SimWorkhorse(Workhorse):
    """One rank of a simulated model."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        super().__init__(runtime)
        self.num_heartbeats = self.num_calls = 0

    def build(self, spec: SimSpec, rank_info: RankInfo) -> None:
        self.spec, self.rank_info, self.version = spec, rank_info, 0

    def heartbeat(self) -> Heartbeat:
        self.num_heartbeats += 1
        return super().heartbeat()

    def where(self) -> Device:
        return Device(self.rank_info.host)

    def counts(self) -> tuple[int, int]:
        """(heartbeats, calls) so far."""
        return self.num_heartbeats, self.num_calls

    def _work(self, call: Call, share: float = 1.0) -> None:
        self.num_calls += 1
        time.sleep(self.spec.scale.time * self.spec.part.seconds[call] * share)

    def _share(self, rows: TextBatch) -> float:
        """Share of a rollout in the whole batch, of which this rank has its replica's part."""
        return len(rows.prompt_lengths) * getattr(self.spec.layout, "data_parallel", 1) / self.spec.rollout_size

    def score(self, rows: TextBatch) -> Scores:
        self._work("score", self._share(rows))
        role = self.rank_info.role
        if role.startswith("rewards"):
            return Scores(scores=(rows.input_ids.values[rows.input_ids.offsets[1:] - 2] % 5).astype(np.float32))
        return Scores(ref_logprobs=_logprobs(rows)) if role == "reference" else Scores(logprobs=_logprobs(rows))

    def train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        self._work("train", self._share(rows))
        counts = ("policy_loss", "entropy_sum", "clip_count", "dual_clip_count", "approx_kl_sum")
        return dict.fromkeys(counts, 0.0) | {"grad_norm": 1.0}

    def generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        length, count = sampling.max_new_tokens, len(rows.seed)
        self._work("generate", count / self.spec.rollout_size)
        tokens = 20 + (rows.seed[:, None] + np.arange(length)) % 200
        return ReplyBatch(
            response_ids=Ragged.of(tokens),
            rollout_logprobs=Ragged.of(np.full((count, length), LOGPROB), np.float32),
            ended=np.ones(count, bool),
        )

    def export_weights(self, version: int, shared: bool, dtype: str | None = None, merged: bool = True) -> SimUpdate:
        self._work("export")
        size = HALF_BYTES * self.spec.part.num_parameters / self.spec.scale.parameters / self.rank_info.world_size
        return SimUpdate(version, (SimBucket(ray.put(np.zeros(int(size), np.uint8)), self.rank_info.rank),))

    def verify_weights(self, update: SimUpdate, number: int, checkers: int) -> None:
        for bucket in update.buckets[number::checkers]:
            assert ray.get(bucket.ref).sum() == 0

    def load_weights(self, update: SimUpdate, verified: bool) -> int:
        self._work("load")
        for bucket in update.buckets:
            ray.get(bucket.ref)
        self.version = update.version
        return update.version

    def save_state(self, directory: Path) -> None:
        """This rank's shard with its index, as real engines leave them."""
        self._work("snapshot")
        part, rank = self.spec.part, self.rank_info.rank
        elements = int(SNAPSHOT_BYTES * part.num_parameters / self.spec.scale.parameters / ELEMENT_BYTES)
        whole = Piece.of((elements,))
        own = whole.between(elements * rank // part.num_gpus, elements * (rank + 1) // part.num_gpus)
        content = bytes([rank % 256]) * (ELEMENT_BYTES * own.size)
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"rank-{rank:05d}.safetensors"
        file.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        shard = Shard(file=file.name, sha256=digest, size=len(content), step=self.version, pieces={"weight/all": own})
        write_atomic(index_path(file), shard.model_dump_json())

    def check_state(self, directory: Path, number: int, checkers: int) -> str | None:
        found = (shard_problem(directory, shard) for shard in read_shards(directory)[number::checkers])
        return next((problem for problem in found if problem is not None), None)

    def load_state(self, directory: Path) -> None:
        self._work("snapshot")
        (directory / f"rank-{self.rank_info.rank:05d}.safetensors").read_bytes()

    def begin_save(self, directory: Path, number: int, copiers: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, directory: Path, head_file: str | None) -> dict[str, str]:
        return {}

    def tried_logprobs(self) -> Tried:
        return "float32", []

    def check_saved(self, directory: Path, head_file: str | None, written: dict[str, str], tried: Tried) -> None:
        """There is nothing to compare."""


def _logprobs(rows: TextBatch) -> Ragged:
    lengths = rows.input_ids.lengths - rows.prompt_lengths
    return Ragged(np.full(lengths.sum(), LOGPROB), np.concatenate([[0], lengths.cumsum()]))
