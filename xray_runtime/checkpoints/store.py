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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from xray_runtime.checkpoints.identity import code_digest, digest, file_sha256, library_versions
from xray_runtime.checkpoints.manifest import MANIFEST, FileEntry, Manifest
from xray_runtime.checkpoints.ref import CheckpointRef

log = logging.getLogger(__name__)

MAX_MANIFEST_BYTES = 16 * 2**20


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
    ) -> CheckpointRef:
        """Make `built` the checkpoint of `stage` under `key`; returns the reference to what is then there.

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
        for entry in manifest.files:
            _fsync(built / entry.path)
        content = manifest.to_bytes()
        with (built / MANIFEST).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        for directory in {built, *(p for p in built.rglob("*") if p.is_dir())}:
            _fsync(directory)
        place = self.directory(stage, key)
        sha256 = hashlib.sha256(content).hexdigest()
        if place.exists():
            if not verify(place):
                there = file_sha256(place / MANIFEST)
                if there != sha256:
                    log.warning("%s: computed again with other bytes (%s, kept %s)", place, sha256, there)
                return CheckpointRef(uri=str(place), sha256=there, stage=stage, kind=kind, step=step)
            _move_aside(place)
        os.rename(built, place)
        _fsync(self.root)
        return CheckpointRef(uri=str(place), sha256=sha256, stage=stage, kind=kind, step=step)


def load_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        ValueError: it is missing, too large, or not a manifest.
    """
    path = directory / MANIFEST
    try:
        if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"{path}: not a manifest (a link, or larger than {MAX_MANIFEST_BYTES} bytes)")
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValidationError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or not a manifest ({str(error).splitlines()[0]})") from error


def verify(directory: Path, sha256: str | None = None) -> list[str]:
    """What is wrong with a checkpoint, in plain words; nothing when every byte is what it was.

    Args:
        sha256: what the checkpoint's digest must be, where it is known.
    """
    if not directory.is_dir():
        return [f"{directory} is missing"]
    try:
        manifest = load_manifest(directory)
    except ValueError as error:
        return [str(error)]
    findings = []
    if sha256 is not None and file_sha256(directory / MANIFEST) != sha256:
        findings.append(f"{MANIFEST} is not the one this checkpoint was published with")
    listed = {entry.path: entry for entry in manifest.files}
    safe = {path: entry for path, entry in listed.items() if _is_safe(path)}
    findings += [f"{path}: unsafe path in the manifest" for path in sorted(set(listed) - set(safe))]
    present = {
        p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_symlink() or not p.is_dir()
    } - {MANIFEST}
    findings += [f"{path} was added" for path in sorted(present - set(listed))]
    with ThreadPoolExecutor() as pool:
        findings += [f for f in pool.map(lambda entry: _check_file(directory, entry), safe.values()) if f]
    return findings


def _check_file(directory: Path, entry: FileEntry) -> str | None:
    path = directory / entry.path
    if path.is_symlink() or any(parent.is_symlink() for parent in path.relative_to(directory).parents if parent.name):
        return f"{entry.path} is a link"
    if not path.is_file():
        return f"{entry.path} is missing"
    if path.stat().st_size != entry.size:
        return f"{entry.path} has {path.stat().st_size} bytes, not {entry.size}"
    if file_sha256(path) != entry.sha256:
        return f"{entry.path} was changed"
    return None


def _is_safe(path: str) -> bool:
    parts = path.split("/")
    return bool(path) and not path.startswith("/") and all(part not in ("", ".", "..") for part in parts)


def _entries(directory: Path) -> list[FileEntry]:
    paths = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda path: file_sha256(directory / path), paths)
    return [
        FileEntry(path=path, sha256=sha256, size=(directory / path).stat().st_size)
        for path, sha256 in zip(paths, hashes, strict=True)
    ]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
