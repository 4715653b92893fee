"""Files derived from a dataset and stored beside it: found by a key of all their inputs, and verified by a seal.

    checkpoints/prepare-ab12….tokens-/KEY.ENDING
    checkpoints/prepare-ab12….tokens-/KEY.ENDING.seal

KEY digests the inputs. A file that is damaged, incomplete, foreign or sealed with another key is made again. The whole
directory may be deleted at any time.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from xray_runtime.kernel.files import sync
from xray_runtime.kernel.store.seal import Seal

log = logging.getLogger(__name__)

SUFFIX = ".tokens-"
"""Suffix of the directory beside a dataset."""


class Derived:
    """The derived files of the dataset in a directory. Only files with the seal of `seal`, the run's key, are read."""

    def __init__(self, dataset: Path, seal: Seal) -> None:
        self._folder, self._seal = dataset.with_name(dataset.name + SUFFIX), seal
        self._folder.mkdir(exist_ok=True)

    def find(self, name: str) -> Path | None:
        """The file with this name, fully verified; None if there is none with a valid seal."""
        path = self._folder / name
        if not os.path.lexists(path) or self._seal.is_sealed(path):
            return path if path.exists() else None
        log.warning("%s has no valid seal of this run's key: it is made again", path)
        return None

    def make(self, name: str, write: Callable[[Path], None]) -> Path:
        """The file with this name; if there is none, `write` makes it at the path that it gets."""
        target, building = self._folder / name, self._folder / f"{name}.building"
        # Concurrent trials of a search need the same file: one makes it, the others wait.
        with FileLock(self._folder / f"{name}.lock"):
            existing = self.find(name)
            if existing is not None:
                return existing
            # We hold the lock, so a file here was left by an ended process.
            _remove(building)
            building.mkdir()
            path = building / name
            write(path)
            sync(path)
            # Write the seal first, so that a file without one is always foreign.
            self._seal.seal_file(target, path)
            _remove(target)
            os.replace(path, target)
            sync(self._folder)
            building.rmdir()
            return target


def _remove(path: Path) -> None:
    """Remove a directory, a link or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
