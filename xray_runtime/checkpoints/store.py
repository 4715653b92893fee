"""The store: immutable checkpoint directories, published whole or not at all.

A checkpoint is built in a temporary directory beside its place, its manifest is written last, everything is fsynced,
and one rename publishes it. A crash leaves a temporary directory that nobody reads and the next build sweeps.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from xray_runtime.checkpoints.identity import code_digest, digest, file_sha256, library_versions
from xray_runtime.checkpoints.manifest import ATTESTATION, CARD, MANIFEST, SIGNATURE, FileEntry, Manifest
from xray_runtime.checkpoints.ref import CheckpointRef
from xray_runtime.files import sync

log = logging.getLogger(__name__)

MAX_RECORD_BYTES = 16 * 2**20
"""A manifest, statement or signature larger than this is refused unread."""


class Store:
    """Checkpoints below one directory, one a stage key."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def directory(self, stage: str, key: str) -> Path:
        """Where the checkpoint of `stage` under `key` is, or would be."""
        return self.root / f"{stage}-{key[:12]}"

    def find(self, stage: str, key: str) -> CheckpointRef | None:
        """The sound checkpoint of `stage` under `key`, if there is one."""
        place = self.directory(stage, key)
        if not place.exists() or verify(place):
            return None
        manifest = load_manifest(place)
        if manifest.key != key:
            return None
        sha256 = file_sha256(place / MANIFEST)
        return CheckpointRef(uri=str(place), sha256=sha256, stage=stage, kind=manifest.kind, step=manifest.step)

    @contextlib.contextmanager
    def building(self, stage: str, key: str) -> Iterator[Path]:
        """A fresh directory to build in; gone afterwards unless it was published."""
        self.root.mkdir(parents=True, exist_ok=True)
        place = self.directory(stage, key)
        _sweep(place)
        temporary = place.with_name(f"{place.name}.building-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def publish(
        self,
        built: Path,
        *,
        stage: str,
        kind: str,
        key: str,
        step: int,
        seed: int,
        parents: dict[str, str],
        dataset: str | None,
        sections: dict[str, Any],
        attest: Callable[[Path, Manifest, str], None] | None = None,
    ) -> CheckpointRef:
        """Make `built` the checkpoint of `stage` under `key`; returns the reference to what is then there.

        `attest(directory, manifest, sha256)` writes the record beside the files before anybody can see them.

        A sound checkpoint that is already there stays (with a warning, should its bytes differ: equal keys should mean
        equal bytes). A damaged one is moved aside, never deleted.
        """
        manifest = Manifest(
            stage=stage,
            kind=kind,
            key=key,
            step=step,
            seed=seed,
            parents=parents,
            dataset=dataset,
            sections=sections,
            config_digest=digest(sections),
            code_digest=code_digest(),
            versions=library_versions(),
            files=_entries(built),
        )
        content = manifest.to_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        (built / MANIFEST).write_bytes(content)
        if attest is not None:
            attest(built, manifest, sha256)
        for path in (built, *built.rglob("*")):
            sync(path)
        place = self.directory(stage, key)
        if place.exists():
            if not verify(place):
                there = file_sha256(place / MANIFEST)
                if there != sha256:
                    log.warning("%s: computed again with other bytes (%s, kept %s)", place, sha256, there)
                return CheckpointRef(uri=str(place), sha256=there, stage=stage, kind=kind, step=step)
            _move_aside(place)
        os.rename(built, place)
        sync(self.root)
        return CheckpointRef(uri=str(place), sha256=sha256, stage=stage, kind=kind, step=step)


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a checkpoint's files."""

    code: str
    """checkpoint-missing, manifest-malformed, manifest-replaced, unsafe-path, file-added, file-missing, file-changed or
    file-link."""
    path: str
    """Of the file, relative to the checkpoint."""
    text: str


def read_bounded(path: Path) -> bytes:
    """The bytes of a small file of ours.

    Raises:
        ValueError: it is a link, no ordinary file, or larger than MAX_RECORD_BYTES.
        OSError: it cannot be read.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()) or path.stat().st_size > MAX_RECORD_BYTES:
        raise ValueError(f"{path}: a link, not a file, or larger than {MAX_RECORD_BYTES} bytes")
    with path.open("rb") as file:
        return file.read(MAX_RECORD_BYTES + 1)


def load_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        ValueError: it is missing, too large, or not a manifest.
    """
    return read_manifest(directory)[0]


def read_manifest(directory: Path) -> tuple[Manifest, str]:
    """The manifest of a checkpoint directory, and its sha256. Raises as `load_manifest`."""
    path = directory / MANIFEST
    try:
        content = read_bounded(path)
        return Manifest.model_validate_json(content), hashlib.sha256(content).hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValidationError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or not a manifest ({str(error).splitlines()[0]})") from error


def verify(directory: Path, sha256: str | None = None) -> list[str]:
    """What is wrong with a checkpoint, in plain words; nothing when every byte is what it was.

    Args:
        sha256: what the checkpoint's digest must be, where it is known.
    """
    return [damage.text for damage in inspect(directory, sha256)]


def inspect(directory: Path, sha256: str | None = None, *, hashing: bool = True) -> list[Damage]:
    """As `verify`, with a code and a path for each. Without `hashing`, contents are judged by their size alone."""
    if directory.is_symlink() or not directory.is_dir():
        return [Damage("checkpoint-missing", "", f"{directory} is missing (or a link)")]
    try:
        manifest, actual = read_manifest(directory)
    except ValueError as error:
        return [Damage("manifest-malformed", MANIFEST, str(error))]
    found = []
    if sha256 is not None and actual != sha256:
        text = f"{MANIFEST} is not the one this checkpoint was published with"
        found.append(Damage("manifest-replaced", MANIFEST, text))
    listed = {entry.path: entry for entry in manifest.files}
    safe = {path: entry for path, entry in listed.items() if _is_safe(path)}
    found += [
        Damage("unsafe-path", path, f"{path}: unsafe path in the manifest") for path in sorted(set(listed) - set(safe))
    ]
    found += [Damage("file-added", path, f"{path} was added") for path in sorted(_present(directory) - set(listed))]
    if hashing:
        with ThreadPoolExecutor() as pool:
            checked = list(pool.map(lambda entry: _check_file(directory, entry, True), safe.values()))
    else:
        checked = [_check_file(directory, entry, False) for entry in safe.values()]
    found += [damage for damage in checked if damage]
    return found


def _present(directory: Path) -> set[str]:
    """Whatever lies in a checkpoint besides its manifest and its attestation; links are not followed."""
    present = set()
    for here, folders, files in os.walk(directory):
        relative = Path(here).relative_to(directory)
        links = [name for name in folders if (Path(here) / name).is_symlink()]
        present |= {(relative / name).as_posix() for name in (*files, *links)}
        if relative == Path() and ATTESTATION not in links:
            folders[:] = [name for name in folders if name != ATTESTATION]
    return present - {MANIFEST, CARD, SIGNATURE}


def _check_file(directory: Path, entry: FileEntry, hashing: bool) -> Damage | None:
    path = directory / entry.path
    if path.is_symlink() or any(
        (directory / parent).is_symlink() for parent in Path(entry.path).parents if parent.name
    ):
        return Damage("file-link", entry.path, f"{entry.path} is a link")
    if not path.is_file():
        return Damage("file-missing", entry.path, f"{entry.path} is missing")
    size = path.stat().st_size
    if size != entry.size:
        return Damage("file-changed", entry.path, f"{entry.path} has {size} bytes, not {entry.size}")
    if hashing and file_sha256(path) != entry.sha256:
        return Damage("file-changed", entry.path, f"{entry.path} was changed")
    return None


def _is_safe(path: str) -> bool:
    parts = path.split("/")
    return "\0" not in path and not path.startswith("/") and all(part not in ("", ".", "..") for part in parts)


def _entries(directory: Path) -> list[FileEntry]:
    paths = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda path: file_sha256(directory / path), paths)
    return [
        FileEntry(path=path, sha256=sha256, size=(directory / path).stat().st_size)
        for path, sha256 in zip(paths, hashes, strict=True)
    ]


def _sweep(place: Path) -> None:
    """Remove what builds of the same key left whose process is gone."""
    for left in place.parent.glob(f"{place.name}.building-*"):
        pid = left.name.rsplit("-", 2)[1]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            shutil.rmtree(left, ignore_errors=True)


def _move_aside(place: Path) -> None:
    number = 1
    while place.with_name(f"{place.name}.damaged-{number}").exists():
        number += 1
    aside = place.with_name(f"{place.name}.damaged-{number}")
    os.rename(place, aside)
    log.warning("%s was damaged; it is kept as %s", place, aside)
