"""A frozen trunk's output for a stage's training rows: computed once, before the first step, and kept.

Every epoch then runs only the trained layers, and so does every later stage with the same trunk and rows: trials of a
search, a run with another learning rate. Their key (`derived`) is a digest of everything that determines them:
the rows' tokens, the trunk's weights and layout, the device, X-ray's code and the libraries. A resumed stage reads the
same bytes. Each stage that reads them hashes them once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.ragged import Ragged, join_ragged
from xray_runtime.kernel.store.derived import Derived
from xray_runtime.methods.common.training.computed import computed_key
from xray_runtime.methods.common.training.steps import TrainingRows
from xray_runtime.models.weight_files import trunk_digest

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.engines.training_config import TrainingConfig
    from xray_runtime.kernel.graph.kind import Recorder

ENDING = ".states"
COLUMNS = {"input_ids": "trunk", "rejected_ids": "rejected_trunk"}
"""Column of tokens → column of their states."""
MAX_BYTES = 16 * 2**30
"""More than this is not kept: every step then computes its own states."""
CHUNK_BYTES = 64 * 2**20
"""Approximate size of the states computed at a time."""
CHUNK_ROWS = 4096


class TrunkStates:
    """The states of a stage's rows; without `trainable_layers` there are none.

    Args:
        start: the checkpoint to train.
        dataset: they are kept next to this directory.
        used: numbers of the rows to train on, ascending.
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
        precision = config.engine.resolved(stage.runtime.device).precision
        self._dtype = np.dtype(np.uint16 if precision == "bfloat16" else np.float32)
        self._replicas = config.engine.data_parallel
        self._keeps = False
        if config.trainable_layers is None:
            return
        self._names = [name for name in COLUMNS if name in rows.take(used[:1])]
        self._hidden: int = json.loads((start / "config.json").read_text())["hidden_size"]
        digest = hashlib.sha256()
        lengths: list[np.ndarray] = []
        total, limit = 0, MAX_BYTES // (self._hidden * self._dtype.itemsize)
        for part in np.array_split(used, max(len(used) // CHUNK_ROWS, 1)):
            ids = self._sequences(part)
            digest.update(ids.values.tobytes())
            lengths.append(ids.lengths)
            total += len(ids.values)
            if total > limit:
                return
        self._keeps = True
        self._bounds = np.cumsum(np.concatenate([[0], *lengths]))
        key = computed_key(
            stage,
            {"engine", "trainable_layers"},
            rows=[digest.hexdigest(), hashlib.sha256(self._bounds.tobytes()).hexdigest()],
            trunk=trunk_digest(start, config.trainable_layers),
            # The last bits depend on which rows are computed together.
            chunk=CHUNK_BYTES,
        )
        self._derived, self._name = Derived(dataset, stage.seal), f"trunk-{key}{ENDING}"

    def compute(self, model: ModelHandle) -> None:
        """Compute the states with `model` if they do not exist yet."""
        if self._keeps:
            path = self._derived.make(self._name, lambda path: self._write(path, model))
            # Read, not mapped: mapped pages would count as this process's memory.
            self._file = path.open("rb", buffering=0)

    def computed(self, model: ModelHandle) -> TrainingRows:
        """The rows with their states, which are computed first if necessary; the rows alone if none are kept."""
        self.compute(model)
        return self if self._keeps else self._rows

    def take(self, rows: np.ndarray) -> TextBatch:
        """These rows, with their states."""
        return self._rows.take(rows).with_columns(**self.columns(rows))

    def columns(self, rows: Sequence[int] | np.ndarray) -> dict[str, Ragged]:
        """The state columns of these rows; empty if states are not kept."""
        if self._file is None:
            return {}
        places = np.searchsorted(self._used, rows)
        return {COLUMNS[name]: self._read(places * len(self._names) + i) for i, name in enumerate(self._names)}

    def _sequences(self, rows: np.ndarray) -> Ragged:
        """Token ids of some rows; for a pair, the chosen side, then the rejected one."""
        sides = self._rows.take(rows).sides()
        width = len(sides)
        return join_ragged(sides, [range(side, len(rows) * width, width) for side in range(width)])

    def _write(self, path: Path, model: ModelHandle) -> None:
        num_bytes = int(self._bounds[-1]) * self._hidden * self._dtype.itemsize
        # No chunk may have fewer rows than there are replicas.
        most = max(len(self._used) // self._replicas, 1)
        done = 0
        with path.open("wb") as file:
            for part in np.array_split(self._used, min(max(num_bytes // CHUNK_BYTES, 1), most)):
                self._recorder.progress(done, len(self._used), "rows", "through the frozen trunk")
                states = get(model.trunk.remote(TextBatch(input_ids=self._sequences(part)))).trunk.values
                if (states.dtype, states.shape[1]) != (self._dtype, self._hidden):
                    raise TypeError(f"the trunk's states are {states.dtype} {states.shape}")
                file.write(np.ascontiguousarray(states).data)
                done += len(part)

    def _read(self, places: np.ndarray) -> Ragged:
        """States of some sequences [N, H]."""
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
