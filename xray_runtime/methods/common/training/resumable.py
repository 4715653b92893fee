"""The state of a training stage, and how it resumes after an interruption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from xray_runtime.cluster.protocols import ModelHandle, get_all

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.kind import Recorder


class KeepsFiles(Protocol):
    """A part of a stage's state that is files in a snapshot."""

    def save_state(self, directory: Path) -> None:
        """Write them into `directory`."""

    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote."""


class Resumable:
    """The state of a stage: trained models in their Workhorses, and small dataclasses.

    Every random choice derives from the seed and the step, so there is no other state.

    Args:
        models: role → trained WholeModel.
        files: state in files, such as rollouts that are not trained on yet.
        parts: name → dataclass whose fields are its whole state (data cursor, KL controller, moments).
    """

    def __init__(
        self, recorder: Recorder, models: Mapping[str, ModelHandle], files: Sequence[KeepsFiles] = (), **parts: Any
    ) -> None:
        self._recorder, self._models, self._files, self._parts = recorder, models, files, parts

    def restore(self) -> int:
        """Restore the newest snapshot whose shards are undamaged; returns the number of steps done."""
        while (snapshot := self._recorder.resume()) is not None:
            # All are checked before any model changes.
            checks = [model.check_state.remote(snapshot.directory / role) for role, model in self._models.items()]
            problem = next((text for text in get_all(checks) if text is not None), None)
            if problem is None:
                break
            self._recorder.refuse_snapshot(problem)
        if snapshot is None:
            return 0
        get_all([model.load_state.remote(snapshot.directory / role) for role, model in self._models.items()])
        for part in self._files:
            part.load_state(snapshot.directory)
        for name, part in self._parts.items():
            for field in fields(part):
                setattr(part, field.name, snapshot.state[name][field.name])
        return snapshot.step

    def step_done(self, step: int, total: int) -> None:
        """Write a snapshot if one is due, but not after the last step, when the checkpoint follows."""
        if step < total and self._recorder.snapshot_due(step):
            state = {name: asdict(part) for name, part in self._parts.items()}
            self._recorder.write_snapshot(step, state, self._save)

    def _save(self, directory: Path) -> None:
        get_all([model.save_state.remote(directory / role) for role, model in self._models.items()])
        for part in self._files:
            part.save_state(directory)
