"""What a frozen trunk gives the rows that a stage trains on: computed once, before the first step, and kept.

So every epoch runs the trained layers alone, and so does every later stage that has the same trunk and the same rows:
trials of a search, a run with another learning rate. Their key (`data.derived`) is a digest of all that decides them:
the rows' tokens, the trunk's weights, how it is spread, the device, X-ray's code and the libraries. An interrupted
stage goes on with the same bytes. They are hashed once by each stage that reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np

from xray_runtime.data.derived import Derived, computed_key
from xray_runtime.data.rows import Ragged, Rows, join_column
from xray_runtime.models.tensor_file import trunk_digest
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.config.engines import TrainingConfig
    from xray_runtime.graph.kind import Recorder, Stage

ENDING = ".states"
COLUMNS = {"input_ids": "trunk", "rejected_ids": "rejected_trunk"}
"""Column of tokens → that of their states."""
MAX_BYTES = 16 * 2**30
"""States of more are not kept: every step computes its own."""
CHUNK_BYTES = 64 * 2**20
"""States that are asked for at a time, about."""
CHUNK_ROWS = 4096


class TrainingRows(Protocol):
    """Rows of tokens with `input_ids`, and `rejected_ids` where they are pairs."""

    def take(self, rows: np.ndarray) -> Rows: ...


class TrunkStates:
    """The states of the rows of one stage; without `trainable_layers` there are none.

    Args:
        start: the checkpoint that is trained.
        dataset: the directory beside which they are kept.
        used: numbers of the rows that will be trained on, in ascending order.
    """

    def __init__(
        self,
        stage: Stage[Any, Any],
        start: Path,
        dataset: Path,
        rows: TrainingRows,
        used: np.ndarray,
        recorder: Recorder,
    ) -> None:
        config: TrainingConfig = stage.config
        self._rows, self._used, self._recorder = rows, used, recorder
        self._file: BinaryIO | None = None
        self._dtype = np.dtype(np.uint16 if config.engine.precision == "bfloat16" else np.float32)
        self._replicas = config.engine.data_parallel
        self._wanted = False
        if config.trainable_layers is None:
            return
        self._names = [name for name in COLUMNS if name in rows.take(used[:1])]
        self._hidden: int = json.loads((start / "config.json").read_text())["hidden_size"]
        digest = hashlib.sha256()
        lengths: list[np.ndarray] = []
        total, limit = 0, MAX_BYTES // (self._hidden * self._dtype.itemsize)
        for part in _parts(used, max(len(used) // CHUNK_ROWS, 1)):
            ids = self._sequences(part)
            digest.update(ids.values.tobytes())
            lengths.append(ids.lengths)
            total += len(ids.values)
            if total > limit:
                return
        self._wanted = True
        self._bounds = np.cumsum(np.concatenate([[0], *lengths]))
        key = computed_key(
            stage,
            {"engine", "trainable_layers"},
            rows=[digest.hexdigest(), hashlib.sha256(self._bounds.tobytes()).hexdigest()],
            trunk=trunk_digest(start, config.trainable_layers),
            # Which rows go through together shows in the last bits.
            chunk=CHUNK_BYTES,
        )
        self._derived, self._name = Derived(dataset, stage.seal), f"trunk-{key}{ENDING}"

    def compute(self, model: ModelHandle) -> None:
        """Have `model` compute them, where they are not there yet."""
        if self._wanted:
            path = self._derived.make(self._name, lambda path: self._write(path, model))
            # Read, not mapped: pages of a map would count as this process's memory.
            self._file = path.open("rb", buffering=0)

    def columns(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """What these rows get for training, beside their tokens; nothing where states are not kept."""
        if self._file is None:
            return {}
        places = np.searchsorted(self._used, rows)
        return {COLUMNS[name]: self._read(places * len(self._names) + i) for i, name in enumerate(self._names)}

    def _sequences(self, rows: np.ndarray) -> Ragged:
        """Token ids of some rows: of a pair the chosen side, then the rejected one."""
        taken, width = self._rows.take(rows), len(self._names)
        sides = [taken[name] for name in self._names]
        ids: Ragged = join_column(sides, [range(side, len(rows) * width, width) for side in range(width)])
        return ids

    def _write(self, path: Path, model: ModelHandle) -> None:
        num_bytes = int(self._bounds[-1]) * self._hidden * self._dtype.itemsize
        # No chunk has fewer rows than there are replicas to share them.
        most = max(len(self._used) // self._replicas, 1)
        done = 0
        with path.open("wb") as file:
            for part in _parts(self._used, min(max(num_bytes // CHUNK_BYTES, 1), most)):
                self._recorder.progress(done, len(self._used), "rows", "through the frozen trunk")
                states = get(model.trunk.remote({"input_ids": self._sequences(part)}))["trunk"].values
                if (states.dtype, states.shape[1]) != (self._dtype, self._hidden):
                    raise TypeError(f"the trunk's states are {states.dtype} {states.shape}")
                file.write(np.ascontiguousarray(states).data)
                done += len(part)

    def _read(self, places: np.ndarray) -> Ragged:
        """The states of some sequences [N, H]."""
        assert self._file is not None
        starts, ends = self._bounds[places], self._bounds[places + 1]
        offsets = np.concatenate([[0], np.cumsum(ends - starts)])
        values = np.empty((offsets[-1], self._hidden), self._dtype)
        size = self._hidden * self._dtype.itemsize
        for to, start, end in zip(offsets, starts, ends, strict=False):
            into = values[to : to + end - start]
            if os.preadv(self._file.fileno(), [into.data], int(start) * size) != into.nbytes:
                raise OSError(f"{self._file.name}: too short")
        return Ragged(values, offsets)


def _parts(used: np.ndarray, count: int) -> Iterator[np.ndarray]:
    return iter(np.array_split(used, count))
