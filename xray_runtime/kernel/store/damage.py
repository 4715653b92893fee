"""Faults of a checkpoint's files: each with a code and a path."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xray_runtime.kernel.store.digest_memory import OutsideChangedError
from xray_runtime.kernel.store.manifest import ATTESTATION, CARD, MANIFEST, SIGNATURE, FileEntry

Digest = Callable[[Path], str]


@dataclass(frozen=True)
class Damage:
    """One fault in a checkpoint's files."""

    code: str
    """checkpoint-missing, manifest-malformed, manifest-replaced, unsafe-path, file-added, file-missing, file-changed or
    file-link."""
    path: str
    """Relative to the checkpoint."""
    text: str


def present_files(directory: Path) -> set[str]:
    """Files and links in a checkpoint besides its manifest and its attestation; links are not followed."""
    present = set()
    for here, folders, files in os.walk(directory):
        relative = Path(here).relative_to(directory)
        links = [name for name in folders if (Path(here) / name).is_symlink()]
        present |= {(relative / name).as_posix() for name in (*files, *links)}
        if relative == Path() and ATTESTATION not in links:
            folders[:] = [name for name in folders if name != ATTESTATION]
    return present - {MANIFEST, CARD, SIGNATURE}


def check_file(directory: Path, entry: FileEntry, digest: Digest | None) -> Damage | None:
    """The fault of one file that a manifest lists; `digest`: as `checkpoints.inspect` has it."""
    path = directory / entry.path
    if any((directory / part).is_symlink() for part in (Path(entry.path), *Path(entry.path).parents)):
        return Damage("file-link", entry.path, f"{entry.path} is a link")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return Damage("file-missing", entry.path, f"{entry.path} is missing: something else has its name")
        # A file of another size is not read: a sparse one claims any number of bytes.
        if status.st_size != entry.size:
            return Damage("file-changed", entry.path, f"{entry.path} has {status.st_size} bytes, not {entry.size}")
        same = digest is None or digest(path) == entry.sha256
    except (FileNotFoundError, NotADirectoryError):
        return Damage("file-missing", entry.path, f"{entry.path} is missing")
    except OutsideChangedError:
        same = False
    except OSError as error:
        return Damage("file-changed", entry.path, f"{entry.path} cannot be read ({error.strerror})")
    return None if same else Damage("file-changed", entry.path, f"{entry.path} was changed")
