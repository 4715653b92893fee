"""Files made from a dataset, kept beside it: found by a key of all that decides them, trusted by their own bytes.

    checkpoints/prepare-ab12….tokens-/KEY-DIGEST.ENDING

KEY says what they are made of, DIGEST what is in them. What is damaged or half written is found by that, and made
again. The whole directory may be deleted at any time.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash
from filelock import FileLock

from xray_runtime.files import sync

log = logging.getLogger(__name__)

SUFFIX = ".tokens-"
"""Of the directory beside a dataset's."""


def derived_directory(dataset: Path) -> Path:
    """The directory beside a dataset's, made where there is none."""
    folder = dataset.with_name(dataset.name + SUFFIX)
    folder.mkdir(exist_ok=True)
    return folder


def find_derived(folder: Path, key: str, ending: str) -> Path | None:
    """The file of this key, if its bytes are those it was named after; a damaged one is deleted."""
    for path in folder.glob(f"{key}-*{ending}"):
        if path.stem == f"{key}-{file_digest(path)}":
            return path
        log.warning("%s is damaged: it is made again", path)
        path.unlink(missing_ok=True)
    return None


def derived_file(folder: Path, key: str, ending: str, write: Callable[[Path], None]) -> Path:
    """The file of this key; where there is none, what `write` writes to the path it is given."""
    # Trials of a search come here at the same time: one makes it, the others wait.
    with FileLock(folder / f"{key}.lock"):
        found = find_derived(folder, key, ending)
        if found is not None:
            return found
        # The lock is ours: what lies here was left by a process that is gone.
        building = folder / f"{key}.building"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        path = building / f"made{ending}"
        write(path)
        sync(path)
        place = folder / f"{key}-{file_digest(path)}{ending}"
        os.replace(path, place)
        sync(folder)
        building.rmdir()
        return place


def file_digest(path: Path) -> str:
    """Digest of a file's bytes."""
    # By plain reads: a map would count as memory of this process.
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
