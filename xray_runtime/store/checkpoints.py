"""The store: immutable checkpoint directories, published whole or not at all.

A checkpoint is built in a temporary directory in `NAME.building-/` beside its place, its manifest is written last,
everything is fsynced, and one rename publishes it. A crash leaves a temporary directory that nobody reads and the next
build sweeps.

With a shared store, what is published is brought there too, and what is not here, or not sound, is fetched from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import ValidationError

from xray_runtime.files import sync
from xray_runtime.store.identity import Identity, file_sha256
from xray_runtime.store.manifest import ATTESTATION, CARD, MANIFEST, SIGNATURE, STATEMENT, FileEntry, Manifest
from xray_runtime.store.ref import CheckpointRef
from xray_runtime.store.shared import DamagedError, SharedStore, is_safe

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Where they lie in an output directory, and in a shared store."""
MAX_RECORD_BYTES = 16 * 2**20
"""A manifest, statement or signature larger than this is refused unread."""


class Store:
    """Checkpoints below one directory, one a stage key; with `shared`, that directory is a cache of what lies there."""

    def __init__(self, root: Path, shared: SharedStore | None = None) -> None:
        self.root, self.shared = root, shared
        self._damaged: set[str] = set()
        """Names under which the shared store was found to hold something damaged."""

    def directory(self, stage: str, key: str) -> Path:
        """Where the checkpoint of `stage` under `key` is, or would be."""
        return self.root / f"{stage}-{key[:12]}"

    def find(self, stage: str, key: str) -> CheckpointRef | None:
        """The sound checkpoint of `stage` under `key`, if there is one: here, or in the shared store, from where it is
        then brought here."""
        place = self.directory(stage, key)
        if (place.exists() and not verify(place)) or self.fetch(place):
            manifest, sha256 = read_manifest(place)
            if manifest.key == key:
                return reference_to(place, manifest, sha256)
        return None

    def fetch(self, place: Path) -> bool:
        """Bring the shared store's checkpoint of this name to `place`; a damaged one that lies there is moved aside.

        False where there is none, or none that is sound. Raises StorageError where the store stays away.
        """
        name = f"{CHECKPOINTS}/{place.name}"
        if self.shared is None or name in self._damaged:
            return False
        with self._building(place) as temporary:
            try:
                index = self.shared.get(name, temporary)
                if index is None:
                    return False
                # Every byte is the index's; the manifest must say the same.
                problems = [damage.text for damage in inspect(temporary, hashing=False)]
                if not problems:
                    entries = load_manifest(temporary).files
                    problems = [f"{e.path} was changed" for e in entries if index.sha256(e.path) != e.sha256]
                if problems:
                    raise DamagedError(f"{self.shared.url}/{name}: {problems[0]}")
            except DamagedError as error:
                log.warning("%s; the copy there is not used", error)
                self._damaged.add(name)
                return False
            self._put_in_place(temporary, place)
            log.info("%s: fetched from %s", place.name, self.shared.url)
        return True

    def bring(self, ref: CheckpointRef) -> None:
        """Have the files of `ref` lie where it says, on this machine; what lies there already is taken as it is.

        Raises:
            RuntimeError: neither this machine nor the shared store has them.
        """
        if not ref.path.exists() and not self.fetch(ref.path):
            raise RuntimeError(f"{ref.path}: the checkpoint is not there, and the shared store has no sound copy")

    def share(self, ref: CheckpointRef) -> None:
        """Bring a checkpoint of this store to the shared one, unless a copy is there. Raises StorageError."""
        name = f"{CHECKPOINTS}/{ref.path.name}"
        if self.shared is None:
            return
        index = self.shared.index(name)
        if index is None or name in self._damaged:
            self.shared.put(name, ref.path)
            self._damaged.discard(name)
        elif index.sha256(MANIFEST) != ref.sha256:
            log.warning("%s: %s/%s has other bytes; both are kept", ref.path, self.shared.url, name)

    @contextlib.contextmanager
    def building(self, stage: str, key: str) -> Iterator[Path]:
        """A fresh directory to build in; gone afterwards unless it was published."""
        with self._building(self.directory(stage, key)) as temporary:
            yield temporary

    @contextlib.contextmanager
    def _building(self, place: Path) -> Iterator[Path]:
        folder = building_folder(place)
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        temporary = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        temporary.mkdir(parents=True)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            # Another build of this key may be at work.
            with contextlib.suppress(OSError):
                folder.rmdir()

    def publish(
        self,
        built: Path,
        identity: Identity,
        *,
        type: str,
        step: int,
        dataset: str | None,
        attest: Callable[[Path, Manifest, str], None] | None = None,
    ) -> CheckpointRef:
        """Make `built` the checkpoint of the stage `identity`; returns the reference to what is then there.

        `attest(directory, manifest, sha256)` writes the record beside the files before anybody can see them.

        A sound checkpoint that is already there, or that another machine has brought to the shared store, stays (with a
        warning, should its bytes differ: equal keys should mean equal bytes). A damaged one is moved aside, never
        deleted.

        Raises:
            StorageError: the shared store did not take it; it is published here.
        """
        key = identity.key
        manifest = Manifest(
            **identity.model_dump(), type=type, key=key, step=step, dataset=dataset, files=_entries(built)
        )
        content = manifest.to_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        (built / MANIFEST).write_bytes(content)
        if attest is not None:
            attest(built, manifest, sha256)
        for path in (built, *built.rglob("*")):
            sync(path)
        place = self.directory(identity.stage, key)
        if not self.fetch(place):
            self._put_in_place(built, place)
        there = file_sha256(place / MANIFEST)
        if there != sha256:
            log.warning("%s: computed again with other bytes (%s, kept %s)", place, sha256, there)
        ref = CheckpointRef(
            uri=str(place), sha256=there, stage=identity.stage, kind=identity.kind, type=type, step=step
        )
        self.share(ref)
        return ref

    def _put_in_place(self, built: Path, place: Path) -> None:
        """Give a whole directory its name, where no sound checkpoint has it."""
        if place.exists():
            if not verify(place):
                return
            _move_aside(place)
        os.rename(built, place)
        sync(self.root)


def building_folder(place: Path) -> Path:
    """Where what will be `place` is built: one folder a key, to be swept without a look at all that lies beside."""
    return place.with_name(f"{place.name}.building-")


def reference_to(directory: Path, manifest: Manifest, sha256: str) -> CheckpointRef:
    """The reference to a checkpoint that was read."""
    return CheckpointRef(
        uri=str(directory),
        sha256=sha256,
        stage=manifest.stage,
        kind=manifest.kind,
        type=manifest.type,
        step=manifest.step,
    )


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a checkpoint's files."""

    code: str
    """checkpoint-missing, manifest-malformed, manifest-replaced, unsafe-path, file-added, file-missing, file-changed or
    file-link."""
    path: str
    """Of the file, relative to the checkpoint."""
    text: str


def read_bounded(path: Path, limit: int = MAX_RECORD_BYTES) -> bytes:
    """The bytes of a small file of ours.

    Raises:
        ValueError: it is a link, no ordinary file, or larger than `limit`.
        OSError: it cannot be read.
    """
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
        raise ValueError(f"{path}: a link, not a file, or larger than {limit} bytes")
    # What has become a link or a pipe meanwhile is not followed, and not waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        return file.read(limit + 1)


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
    safe = {path: entry for path, entry in listed.items() if is_safe(path)}
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


def _entries(directory: Path) -> list[FileEntry]:
    paths = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda path: file_sha256(directory / path), paths)
    return [
        FileEntry(path=path, sha256=sha256, size=(directory / path).stat().st_size)
        for path, sha256 in zip(paths, hashes, strict=True)
    ]


def _sweep(folder: Path) -> None:
    """Remove what builds left whose process is gone."""
    for left in folder.iterdir():
        pid = left.name.partition("-")[0]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            shutil.rmtree(left, ignore_errors=True)


def _move_aside(place: Path) -> None:
    number = 1
    while place.with_name(f"{place.name}.damaged-{number}").exists():
        number += 1
    aside = place.with_name(f"{place.name}.damaged-{number}")
    os.rename(place, aside)
    log.warning("%s was damaged; it is kept as %s", place, aside)


def statement_sha256(directory: Path) -> str | None:
    """Digest of the statement, where there is one."""
    path = directory / ATTESTATION / STATEMENT
    if path.parent.is_symlink() or path.is_symlink() or not path.is_file():
        return None
    return file_sha256(path)
