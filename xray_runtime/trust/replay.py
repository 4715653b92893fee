"""Replay: a published stage computed again, and every byte compared.

Snapshots are removed when a stage is published, so a replay starts from the stage's inputs, with its body and config.
A PPO stage may end after a given iteration: each is compared with the ledger, which has a digest of the weights after
it, since the next iteration sent them to its generator. Where a stage runs to its end, the files are compared with the
checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.data.ledger import Difference, first_difference, iterations, read_shard, shard_path
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.trust.recompute import Done, OnProgress, Recomputation, recompute
from xray_runtime.trust.replayable import Replayable

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import OpenModels


@dataclass
class Replay:
    """The result of a replay."""

    iteration: int | None
    """The last one that is compared. None: the stage is computed to its end."""
    compared: list[int] = field(default_factory=list)
    """Iterations whose rollouts are equal in every byte."""
    difference: Difference | None = None
    changed_since: bool = False
    """Whether the replay equals what was published: then the file was changed later."""
    weights: str | None = None
    """Digest of the trained weights, if they were compared."""
    files: int = 0
    """Files of the checkpoint that are equal in every byte, once the stage came to its end."""
    taken: list[str] = field(default_factory=list)
    """Sources of reward that might answer differently when asked again: their answers are in the checkpoint."""

    @property
    def is_same(self) -> bool:
        return self.difference is None and (self.files > 0 or self.iteration in self.compared)

    def to_json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "same": self.is_same,
            "iteration": self.iteration,
            "compared": self.compared,
            "files": self.files,
            "weights": self.weights,
            "taken": self.taken,
            "difference": None if found is None else vars(found) | {"changed_since": self.changed_since},
        }


def replay(
    stage: Replayable,
    iteration: int | None,
    open_models: OpenModels,
    scratch: Path,
    progress: OnProgress = lambda *_: None,
) -> Replay:
    """Compute `stage` again up to `iteration`, or to its end; compare each iteration that a ledger has, and the files.

    Args:
        open_models: `cluster.opening.model_opener`.
        scratch: an empty directory for its output.

    Raises:
        Exception: any error of the body.
    """
    recorder = ReplayRecorder(stage, iteration, scratch, progress)
    recorder.result.taken = recompute(recorder, open_models)
    return recorder.result


class ReplayRecorder(Recomputation):
    """Compares each iteration as soon as its shard is written."""

    def __init__(self, stage: Replayable, last: int | None, scratch: Path, progress: OnProgress) -> None:
        super().__init__(stage, last, scratch, progress)
        self.result = Replay(last)
        self._kept = set(iterations(stage.ledger))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        if step in self._kept:
            self._compare(step)
            self.result.compared.append(step)
        if self.result.iteration is not None and step > self.result.iteration:
            # There is no digest of the weights; but this iteration, which started from them, is equal.
            raise Done

    def _compare(self, step: int) -> None:
        name = shard_path(Path(LEDGER), step).as_posix()
        ours, theirs = self.out / name, self.stage.node.directory / name
        if ours.read_bytes() == theirs.read_bytes():
            return
        listed = {entry.path: entry.sha256 for entry in self.stage.node.manifest.files}
        self.result.changed_since = file_sha256(ours) == listed.get(name)
        try:
            found = first_difference(read_shard(theirs), read_shard(ours))
        except ValueError as error:
            found = Difference(step, None, name, str(error), "a sound shard")
        self._end(found or Difference(step, None, name, "the same values in different bytes", "those of the values"))

    def sent(self, version: int, digest: str | None) -> None:
        """Compare the policy after `version` updates, as it is sent to the generator."""
        if version in self._kept:
            path = shard_path(self.stage.ledger, version)
            try:
                recorded = read_shard(path).policy
            except ValueError as error:
                self._end(Difference(version, None, path.name, str(error), "a sound shard"))
            if recorded is not None and digest != recorded:
                self._end(Difference(version - 1, None, "weights after it", recorded, str(digest)))
            last = self.result.iteration
            if last is not None and version > last and recorded is not None:
                self.result.weights = digest
                raise Done

    def published(self) -> None:
        """Compare the files of the body, which has ended, with the checkpoint's."""
        from xray_runtime.kernel.store.manifest import WEIGHTS_INDEX
        from xray_runtime.models.tensor_file import WEIGHTS_FILE

        for entry in self.stage.node.manifest.files:
            if entry.path.startswith(f"{LEDGER}/"):
                continue
            path = self.out / entry.path
            made = file_sha256(path) if path.is_file() else "no such file"
            if made != entry.sha256:
                self._end(Difference(self.result.iteration, None, entry.path, entry.sha256, made))
            self.result.files += 1
            # The index has the digests of all files of weights.
            if entry.path in (WEIGHTS_FILE, WEIGHTS_INDEX):
                self.result.weights = made

    def _end(self, found: Difference) -> None:
        self.result.difference = found
        raise Done
