"""Packing an iteration: a replay up to it, which keeps the state before it and notes what its update computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.kernel.store.snapshots import STATE
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.trust.iteration.bundle import SNAPSHOT, Iteration, require_key, write_bundle
from xray_runtime.trust.iteration.sample import SamplePath
from xray_runtime.trust.iteration.sample_page import write_page
from xray_runtime.trust.iteration.updates import UpdateNumbers, UpdateWatch
from xray_runtime.trust.recompute import Models, OnProgress, recompute
from xray_runtime.trust.replay import Replay, ReplayRecorder
from xray_runtime.trust.replayable import Replayable

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import OpenModels


def check_bundle(store: LineageStore, stage: Replayable, iteration: int, path: Path, row: int | None) -> None:
    """Raises ConfigError where no bundle can be written, before anything is computed.

    Args:
        row: of the reply whose page is asked for.
    """
    require_key(store)
    config = stage.config
    if not isinstance(config, PPOConfig) or config.in_flight_updates:
        raise ConfigError(
            f"REF: {stage.node.name} is not allowed: must be of kind 'ppo', without in_flight_updates, whose replies "
            "run across iterations"
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"BUNDLE: {str(path)!r} is not allowed: must be a file in a directory that exists")
    if row is None:
        return
    table = read_shard(shard_path(stage.ledger, iteration)).table
    if "reply_ids" not in table.column_names:
        raise ConfigError("--sample: not allowed: the ledger has hashed tokens, and no numbers of single ones")
    trained = [
        n for n, times in zip(table["row"].to_pylist(), table["times_trained"].to_pylist(), strict=True) if times
    ]
    if row not in trained:
        known = ", ".join(map(str, trained))
        raise ConfigError(
            f"--sample: {row} is not allowed: must be a row that iteration {iteration} learned from, one of {known}"
        )


def pack(
    store: LineageStore,
    stage: Replayable,
    iteration: int,
    path: Path,
    open_models: OpenModels,
    scratch: Path,
    progress: OnProgress = lambda *_: None,
    row: int | None = None,
) -> Replay:
    """Replay `stage` up to an iteration and write its bundle to `path`, unless the replay differs from the ledger.

    Args:
        scratch: an empty directory.
        row: of a reply, whose path to its gradient becomes a page of the bundle.

    Raises:
        ConfigError: a bundle cannot be written.
        Exception: any error of the body.
    """
    recorder = _Packing(stage, iteration, scratch, progress, row)
    result = recorder.result
    result.taken = recompute(recorder, open_models)
    if not result.is_same:
        return result
    assert recorder.update is not None
    if recorder.sample is not None:
        config = stage.config
        assert isinstance(config, PPOConfig)
        page = recorder.made / f"sample-{row}.html"
        write_page(page, stage.node, config, iteration, recorder.sample.row, recorder.sample.steps)
    record = Iteration(checkpoint=stage.node.sha256, iteration=iteration, update=recorder.update)
    write_bundle(store, stage, record, recorder.made, path)
    return result


class _Packing(ReplayRecorder):
    def __init__(self, stage: Replayable, iteration: int, scratch: Path, progress: OnProgress, row: int | None) -> None:
        super().__init__(stage, iteration, scratch, progress)
        self._iteration = iteration
        self.made = scratch / "bundle"
        self.made.mkdir()
        self.update: UpdateNumbers | None = None
        self.sample = None if row is None else SamplePath(row, scratch / "sample")
        self._watch = UpdateWatch(scratch / "after", None if self.sample is None else self.sample.before)

    def specs(self, specs: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.sample is not None:
            self.sample.objective = specs["policy"].objective
        return specs

    def opened(self, models: Models) -> Models:
        self._watch.is_on = self._iteration == 0
        if self.sample is not None:
            self.sample.policy = models["policy"]
        return self._watch.watched(models)

    def snapshot_due(self, step: int) -> bool:
        return step == self._iteration

    def write_snapshot(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> None:
        directory = self.made / SNAPSHOT
        directory.mkdir()
        save(directory)
        # Earlier iterations are not replayed again.
        shutil.rmtree(directory / LEDGER, ignore_errors=True)
        (directory / STATE).write_text(json.dumps(state), encoding="utf-8")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        if step == self._iteration:
            self.update = self._watch.result()
            if self.sample is not None:
                self.sample.end(self.update)
        self._watch.is_on = step + 1 == self._iteration
        super().metrics(values, step)
