"""Files made from a dataset, kept beside it: found by a key of all that decides them, read as they were sealed.

    checkpoints/prepare-ab12….tokens-/KEY.ENDING
    checkpoints/prepare-ab12….tokens-/KEY.ENDING.seal

KEY says what they are made of. What is damaged, half written, planted or sealed with another key is made again. The
whole directory may be deleted at any time.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from xray_runtime.files import sync
from xray_runtime.store.identity import digest, environment_digest
from xray_runtime.store.seal import Seal

if TYPE_CHECKING:
    from xray_runtime.graph.kind import Stage

log = logging.getLogger(__name__)

SUFFIX = ".tokens-"
"""Of the directory beside a dataset's."""


class Derived:
    """The files kept beside one dataset.

    Args:
        dataset: its directory.
        seal: whose files are read.
    """

    def __init__(self, dataset: Path, seal: Seal) -> None:
        self._folder, self._seal = dataset.with_name(dataset.name + SUFFIX), seal
        self._folder.mkdir(exist_ok=True)

    def find(self, name: str) -> Path | None:
        """The file of this name, every byte of it verified; None where there is none that is as it was sealed."""
        path = self._folder / name
        if not os.path.lexists(path) or self._seal.is_sealed(path):
            return path if path.exists() else None
        log.warning("%s is not as this run's key sealed it: it is made again", path)
        return None

    def make(self, name: str, write: Callable[[Path], None]) -> Path:
        """The file of this name; where there is none, what `write` writes to the path it is given."""
        place, building = self._folder / name, self._folder / f"{name}.building"
        # Trials of a search come here at the same time: one makes it, the others wait.
        with FileLock(self._folder / f"{name}.lock"):
            found = self.find(name)
            if found is not None:
                return found
            # The lock is ours: what lies here was left by a process that is gone.
            _remove(building)
            building.mkdir()
            path = building / name
            write(path)
            sync(path)
            # First the seal: a file that lies in its place is sealed, or was put there by somebody else.
            self._seal.seal_file(place, path)
            _remove(place)
            os.replace(path, place)
            sync(self._folder)
            building.rmdir()
            return place


def computed_key(stage: Stage[Any, Any], layout: Set[str], **content: Any) -> str:
    """The key of what a stage's model computes: of `content`, and of all else that shows in the last bits.

    Args:
        layout: the fields of the stage's config that say how the model is spread.
    """
    config = stage.config.model_dump(mode="json", include=layout)
    runtime = [stage.runtime.device, stage.runtime.threads]
    return digest({**content, "layout": config, "runtime": runtime, "software": environment_digest()})[:32]


def _remove(path: Path) -> None:
    """Whatever lies there: a directory, a link, a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
