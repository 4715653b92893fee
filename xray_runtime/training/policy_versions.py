"""Versions of a policy that a stage may yet end with: kept beside its snapshots, and in each of them.

A version is whole or not there. In a snapshot it is a second name for the same files, so that an attempt on another
machine, which has nothing but the snapshot, can end with it too.
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

from xray_runtime.config.engines import ValidationSchedule
from xray_runtime.files import sync
from xray_runtime.graph.artifacts import VALUE_HEAD
from xray_runtime.workers.protocols import ModelHandle, get

RECORD = "validation.json"


def save_policy(models: Mapping[str, ModelHandle], directory: Path) -> None:
    """The policy in Hugging Face form, with the critic's head or, in critic/, the critic."""
    directory.mkdir(parents=True, exist_ok=True)
    get(models["policy"].save.remote(directory, VALUE_HEAD))
    if "critic" in models:
        get(models["critic"].save.remote(directory / "critic", VALUE_HEAD))


class PolicyVersions:
    """Versions by the number of updates they have learned from: those this attempt wrote, or took from its snapshot.

    What else lies in the directory was left by an attempt whose snapshot does not count, or put there by somebody.

    Args:
        directory: that of the stage; it outlives an attempt.
        name: what tells these versions from others in there.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._prefix = directory, f"{name}-"
        self._own: set[int] = set()

    def numbers(self) -> list[int]:
        """Those that are there, in order."""
        return sorted(self._own)

    def write(self, models: Mapping[str, ModelHandle], updates: int) -> None:
        """Keep the policy as it is, after `updates`."""
        with self._writing(self._name(updates)) as temporary:
            save_policy(models, temporary)
        self._own.add(updates)

    def remove(self, updates: int) -> None:
        """Keep this one no longer."""
        shutil.rmtree(self._directory / self._name(updates))
        self._own.remove(updates)

    def copy(self, updates: int, out: Path) -> None:
        """Put the files of a version into `out`."""
        shutil.copytree(self._directory / self._name(updates), out, dirs_exist_ok=True)

    def save_state(self, directory: Path) -> None:
        """Put all of them into a snapshot."""
        for name in map(self._name, self.numbers()):
            shutil.copytree(self._directory / name, directory / name, copy_function=_link)

    def load_state(self, directory: Path) -> None:
        """Go on with those of a snapshot."""
        for place in sorted(directory.glob(f"{self._prefix}*")):
            with self._writing(place.name) as temporary:
                shutil.copytree(place, temporary, copy_function=_link)
            self._own.add(int(place.name.removeprefix(self._prefix)))

    def _name(self, updates: int) -> str:
        return f"{self._prefix}{updates:06d}"

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """A place to make what is then, whole, the version `name`."""
        place, temporary = self._directory / name, self._directory / f"{name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        yield temporary
        for path in (temporary, *temporary.rglob("*")):
            sync(path)
        shutil.rmtree(place, ignore_errors=True)
        os.rename(temporary, place)
        sync(self._directory)


@dataclass
class Seen:
    """What was found so far: all that an attempt after this one has to know."""

    scores: dict[str, float] = field(default_factory=dict)
    """Updates of the policy → score."""
    best: int = -1
    """Updates of the best version, the first of equals; -1: none was looked at."""


class BestVersion:
    """The best version so far; it is kept beside the snapshots and in them.

    Args:
        directory: as `PolicyVersions` takes it.
        validation: which version the stage ends with; None: the last.
    """

    def __init__(self, directory: Path, validation: ValidationSchedule | None) -> None:
        self._versions = PolicyVersions(directory, "best")
        self._keep = validation.keep if validation is not None else "last"
        self.state = Seen()

    def saw(self, models: Mapping[str, ModelHandle], updates: int, score: float) -> None:
        """Keep the policy as it is, after `updates`, where its score is the highest so far."""
        self.state.scores[str(updates)] = score
        if score > self.state.scores.get(str(self.state.best), -math.inf):
            self.state.best = updates
            if self._keep == "best":
                self._versions.write(models, updates)
                for other in self._versions.numbers():
                    if other != updates:
                        self._versions.remove(other)

    def save(self, models: Mapping[str, ModelHandle], out: Path, updates: int, record: Mapping[str, Any]) -> int:
        """Write the version that is kept into `out`, with all scores and `record` in `RECORD`; the policy is the last
        one, after `updates`. Returns how many the kept one is after."""
        kept = self.state.best if self._keep == "best" and self.state.best >= 0 else updates
        if kept in self._versions.numbers():
            self._versions.copy(kept, out)
        else:
            save_policy(models, out)
        content = {"kept": kept, "scores": self.state.scores, **record}
        (out / RECORD).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        return kept

    def save_state(self, directory: Path) -> None:
        """Put the best version so far into a snapshot."""
        self._versions.save_state(directory)

    def load_state(self, directory: Path) -> None:
        """Go on from what `save_state` wrote."""
        self._versions.load_state(directory)


def _link(source: str, target: str) -> None:
    """Another name for a file that nobody changes; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
