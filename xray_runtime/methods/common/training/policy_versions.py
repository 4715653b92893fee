"""Versions of a policy that a stage may end with, kept next to its snapshots and in each of them.

Versions are written atomically. Snapshots hard-link their files, so an attempt on another machine, which has only the
snapshot, can end with them too.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.kernel.config.section import ValidationSchedule
from xray_runtime.kernel.files import link_or_copy, sync
from xray_runtime.kernel.graph.artifacts import VALUE_HEAD

RECORD = "validation.json"


def save_policy(models: Mapping[str, ModelHandle], directory: Path) -> None:
    """Save the policy in Hugging Face form, with the critic's head or, in critic/, the critic."""
    directory.mkdir(parents=True, exist_ok=True)
    get(models["policy"].save.remote(directory, VALUE_HEAD))
    if "critic" in models:
        get(models["critic"].save.remote(directory / "critic", VALUE_HEAD))


class PolicyVersions:
    """Versions by number of updates: those that this attempt wrote or restored from its snapshot. Other files in the
    directory are ignored.

    Args:
        directory: the stage's kept directory, which outlives an attempt.
        name: prefix of the versions' directories.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._prefix = directory, f"{name}-"
        self._own: set[int] = set()

    def numbers(self) -> list[int]:
        """Numbers of updates of the versions, ascending."""
        return sorted(self._own)

    def write(self, models: Mapping[str, ModelHandle], updates: int) -> None:
        """Keep the current policy, which has made `updates`."""
        with self._writing(self._name(updates)) as temporary:
            save_policy(models, temporary)
        self._own.add(updates)

    def remove(self, updates: int) -> None:
        shutil.rmtree(self._directory / self._name(updates))
        self._own.remove(updates)

    def copy(self, updates: int, out: Path) -> None:
        shutil.copytree(self._directory / self._name(updates), out, dirs_exist_ok=True)

    def save_state(self, directory: Path) -> None:
        """Link all versions into a snapshot."""
        for name in map(self._name, self.numbers()):
            shutil.copytree(self._directory / name, directory / name, copy_function=link_or_copy)

    def load_state(self, directory: Path) -> None:
        for version in sorted(directory.glob(f"{self._prefix}*")):
            with self._writing(version.name) as temporary:
                shutil.copytree(version, temporary, copy_function=link_or_copy)
            self._own.add(int(version.name.removeprefix(self._prefix)))

    def _name(self, updates: int) -> str:
        return f"{self._prefix}{updates:06d}"

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """A temporary directory that becomes the version `name`."""
        target, temporary = self._directory / name, self._directory / f"{name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        yield temporary
        for path in (temporary, *temporary.rglob("*")):
            sync(path)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)
        sync(self._directory)


@dataclass
class BestState:
    """The state that snapshots keep."""

    scores: dict[str, float] = field(default_factory=dict)
    """Number of updates → score."""
    best: int = -1
    """Number of updates of the best version, the earliest if several are equal; -1: none was scored."""


class BestVersion:
    """The version that `validation` keeps, the best one so far or the last (None); `directory` as for
    `PolicyVersions`."""

    def __init__(self, directory: Path, validation: ValidationSchedule | None) -> None:
        self.versions = PolicyVersions(directory, "best")
        self._validates = validation is not None
        self._keep = validation.keep if validation is not None else "last"
        self.state = BestState()

    def update(self, models: Mapping[str, ModelHandle], updates: int, score: float) -> None:
        """Keep the current policy, which has made `updates`, if its score is the highest so far."""
        self.state.scores[str(updates)] = score
        if score > self.state.scores.get(str(self.state.best), -math.inf):
            self.state.best = updates
            if self._keep == "best":
                self.versions.write(models, updates)
                for other in self.versions.numbers():
                    if other != updates:
                        self.versions.remove(other)

    def save(self, models: Mapping[str, ModelHandle], out: Path, updates: int, record: Mapping[str, Any]) -> int:
        """Write the kept version into `out`, with `validation` also all scores and `record` in `RECORD`. The current
        policy has made `updates`. Returns the number of updates of the kept version."""
        kept = self.state.best if self._keep == "best" and self.state.best >= 0 else updates
        if kept in self.versions.numbers():
            self.versions.copy(kept, out)
        else:
            save_policy(models, out)
        if not self._validates:
            return kept
        content = {"kept": kept, "scores": self.state.scores, **record}
        (out / RECORD).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        return kept
