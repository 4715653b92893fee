"""The store: immutable checkpoint directories, published whole or not at all.

A checkpoint is built in a temporary directory in `NAME.building-/` next to its final place. Its manifest is written
last, everything is fsynced, and one rename publishes it. A crash leaves a temporary directory that no reader opens and
the next build removes.

With a shared store, every published checkpoint is copied there, and one that is missing or damaged here is fetched.
Others can write to both, so nothing is used before its signed record was checked (`check_record`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import psutil
from pydantic import ValidationError

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.files import sync
from xray_runtime.kernel.store.damage import Damage, Digest, check_file, present_files
from xray_runtime.kernel.store.digest_memory import DigestMemory, FileReader
from xray_runtime.kernel.store.identity import Identity, file_sha256
from xray_runtime.kernel.store.manifest import ATTESTATION, MANIFEST, STATEMENT, Manifest, file_entries, is_record
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.shared import DamagedError, SharedStore, is_safe

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Their directory in an output directory, and in a shared store."""
MAX_RECORD_BYTES = 16 * 2**20
"""A manifest, statement or signature larger than this is refused unread."""

CheckRecord = Callable[[Path, Manifest, str], str | None]
"""(directory, manifest, sha256) → why a checkpoint is not trusted, None where it is."""


class Store:
    """Checkpoints below one directory, one for each stage key.

    Args:
        shared: where copies are kept; the directory is then a cache of it.
        check_record: checks the signed record of a checkpoint, here or just fetched (`attestation.open_store`).
        memory: digests by which `find` does not read a file again that has not changed since it was read.
    """

    def __init__(
        self,
        root: Path,
        shared: SharedStore | None = None,
        check_record: CheckRecord | None = None,
        memory: DigestMemory | None = None,
    ) -> None:
        self.root, self.shared, self._check_record, self._memory = root, shared, check_record, memory
        self._damaged: set[str] = set()
        """Names under which the shared store holds a damaged copy."""

    def directory(self, stage: str, key: str) -> Path:
        """The directory of the checkpoint of `stage` under `key`, whether it exists or not."""
        return self.root / f"{stage}-{key[:12]}"

    def find(self, stage: str, key: str) -> CheckpointRef | None:
        """The sound checkpoint of `stage` under `key`, fetched from the shared store if need be; None without one.

        Files in the state in which they were read before are not read again; `digest_memory` says what that promises.
        """
        directory = self.directory(stage, key)
        if self.is_sound(directory) or self.fetch(directory):
            manifest, sha256 = read_manifest(directory)
            if manifest.key == key:
                return manifest.reference(directory, sha256)
        return None

    def is_sound(self, directory: Path, expected: str | None = None) -> bool:
        """Whether a checkpoint (the one with the digest `expected`) is here, unchanged and trusted; a warning says why
        it is not trusted."""
        with FileReader(self._memory) if self._memory else contextlib.nullcontext() as reader:
            digest = reader.digest if reader else file_sha256
            return os.path.lexists(directory) and self._problem(directory, digest, expected) is None

    def fetch(self, directory: Path, expected: str | None = None) -> bool:
        """Fetch the shared store's checkpoint of this name; a damaged one that is here is moved aside.

        Returns whether the shared store has a sound and trusted copy (of the digest `expected`). Its weights are only
        fetched once its signed record was checked. Raises StorageError where the store cannot be reached.
        """
        name = f"{CHECKPOINTS}/{directory.name}"
        if self.shared is None or name in self._damaged:
            return False
        with self._building(directory) as temporary:
            try:
                index = self.shared.index(name)
                if index is None:
                    return False
                record = [entry for entry in index.files if is_record(entry.path)]
                if any(entry.size > MAX_RECORD_BYTES for entry in record):
                    raise DamagedError(f"{self.shared.url}/{name}: its record is too large")
                self.shared.get_files(name, index, record, temporary)
                problem = self._record_problem(temporary, directory.name, expected)
                if problem is None:
                    # The manifest is trusted: what it lists is fetched if the index says the same.
                    weights = [entry for entry in index.files if not is_record(entry.path)]
                    entries = load_manifest(temporary).files
                    problem = "its index differs from its manifest" if weights != entries else None
                if problem is not None:
                    raise DamagedError(f"{self.shared.url}/{name}: {problem}")
                self.shared.get_files(name, index, weights, temporary)
                problem = next((damage.text for damage in inspect(temporary, expected, digest=None)), None)
                if problem is not None:
                    raise DamagedError(f"{self.shared.url}/{name}: {problem}")
            except DamagedError as error:
                log.warning("%s; the copy there is not used", error)
                self._damaged.add(name)
                return False
            self._put_in_place(temporary, directory)
            log.info("%s: fetched from %s", directory.name, self.shared.url)
        return expected is None or file_sha256(directory / MANIFEST) == expected

    def ensure_local(self, ref: CheckpointRef) -> None:
        """Check the files of `ref` before they are read; fetch them if they are missing or damaged here.

        Raises RuntimeError: neither this machine nor the shared store has them, unchanged and trusted.
        """
        if not self.is_sound(ref.path, ref.sha256) and not self.fetch(ref.path, ref.sha256):
            raise RuntimeError(
                f"{ref.path}: checkpoint {ref.sha256[:12]} is missing or was changed, and no shared store has a sound "
                "copy; run again: what is missing is computed again"
            )

    def share(self, ref: CheckpointRef) -> None:
        """Copy a checkpoint to the shared store unless a copy is there. Raises StorageError."""
        name = f"{CHECKPOINTS}/{ref.path.name}"
        if self.shared is None:
            return
        index = self.shared.index(name)
        if index is None or name in self._damaged:
            known = {ref.path / entry.path: entry.sha256 for entry in load_manifest(ref.path).files}
            self.shared.put(name, ref.path, lambda path: known.get(path) or file_sha256(path))
            self._damaged.discard(name)
        elif index.sha256(MANIFEST) != ref.sha256:
            log.warning("%s: %s/%s has different bytes; both are kept", ref.path, self.shared.url, name)

    def building(self, stage: str, key: str) -> contextlib.AbstractContextManager[Path]:
        """A fresh directory to build in, removed afterwards unless it was published."""
        return self._building(self.directory(stage, key))

    @contextlib.contextmanager
    def _building(self, directory: Path) -> Iterator[Path]:
        folder = building_folder(directory)
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        temporary = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        temporary.mkdir(parents=True)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            # Another process may be building under this key.
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
        """Make `built` the checkpoint of the stage `identity`; returns the reference to what is then in its place.

        A sound checkpoint that is already there, or that another machine has put into the shared store, stays, with a
        warning if its bytes differ: equal keys should mean equal bytes. A damaged one is moved aside, never deleted.

        Args:
            attest: writes the record of the checkpoint before any reader can see it.

        Raises:
            StorageError: the shared store did not take it; it is published here.
        """
        # It imports numpy, which writing a graph does without.
        from xray_runtime.kernel.store.shards import written_sha256

        key = identity.key
        files = file_entries(built, written_sha256)
        manifest = Manifest(**identity.model_dump(), type=type, key=key, step=step, dataset=dataset, files=files)
        content = manifest.to_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        (built / MANIFEST).write_bytes(content)
        if attest is not None:
            attest(built, manifest, sha256)
        for path in (built, *built.rglob("*")):
            sync(path)
        directory = self.directory(identity.stage, key)
        if not self.fetch(directory):
            self._put_in_place(built, directory)
        actual = file_sha256(directory / MANIFEST)
        if actual != sha256:
            log.warning("%s: computed again with different bytes (%s, kept %s)", directory, sha256, actual)
        ref = manifest.reference(directory, actual)
        self.share(ref)
        return ref

    def _problem(self, directory: Path, sha256: Digest = file_sha256, expected: str | None = None) -> str | None:
        """Why a checkpoint is not used; None where it is sound."""
        problem = next((damage.text for damage in inspect(directory, expected, digest=sha256)), None)
        if problem is None and (problem := self._record_problem(directory, directory.name, expected)):
            log.warning("%s: %s; it is not used", directory, problem)
        return problem

    def _record_problem(self, directory: Path, name: str, expected: str | None) -> str | None:
        """Why the record in `directory` is not that of the checkpoint `name`, or is not trusted."""
        try:
            manifest, sha256 = read_manifest(directory)
        except ValueError as error:
            return first_line(error)
        if name != f"{manifest.stage}-{manifest.key[:12]}":
            return f"it is the checkpoint {manifest.stage}-{manifest.key[:12]}, under another name"
        if expected not in (None, sha256):
            return f"it is {sha256[:12]}, not {str(expected)[:12]}"
        return self._check_record(directory, manifest, sha256) if self._check_record is not None else None

    def _put_in_place(self, built: Path, directory: Path) -> None:
        """Give a whole directory its name, unless a sound checkpoint has it."""
        if directory.exists():
            if self._problem(directory) is None:
                return
            _move_aside(directory)
        os.rename(built, directory)
        sync(self.root)


def building_folder(directory: Path) -> Path:
    """The folder in which a checkpoint is built: one for each key, so that cleaning up lists only that one."""
    return directory.with_name(f"{directory.name}.building-")


def read_bounded(path: Path, limit: int = MAX_RECORD_BYTES) -> bytes:
    """The bytes of a small file. Raises as `open_bounded`."""
    with open_bounded(path, limit) as file:
        return file.read(limit + 1)


def open_bounded(path: Path, limit: int) -> FileIO:
    """A file to read. Raises ValueError for a link, a special file or more than `limit` bytes; OSError."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
        raise ValueError(f"{path}: a link, not a file, or larger than {limit} bytes")
    # A link or a pipe put there meanwhile is neither followed nor waited for.
    return FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))


def load_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory. Raises ValueError as `read_manifest`."""
    return read_manifest(directory)[0]


def read_manifest(directory: Path) -> tuple[Manifest, str]:
    """(manifest of a checkpoint directory, its sha256). Raises ValueError where it is missing, too large or damaged."""
    path = directory / MANIFEST
    try:
        content = read_bounded(path)
        return Manifest.model_validate_json(content), hashlib.sha256(content).hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValidationError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or not a manifest ({first_line(error)})") from error


def verify(directory: Path, sha256: str | None = None) -> list[str]:
    """The faults of a checkpoint as text, none when every byte is unchanged; `sha256`: its digest, where known."""
    return [damage.text for damage in inspect(directory, sha256)]


def inspect(directory: Path, sha256: str | None = None, digest: Digest | None = file_sha256) -> list[Damage]:
    """As `verify`, each with a code and a path. `digest`: sha256 of a file; None: only sizes are compared."""
    if directory.is_symlink() or not directory.is_dir():
        return [Damage("checkpoint-missing", "", f"{directory} is missing (or a link)")]
    try:
        manifest, actual = read_manifest(directory)
    except ValueError as error:
        return [Damage("manifest-malformed", MANIFEST, str(error))]
    damages = []
    if sha256 is not None and actual != sha256:
        text = f"{MANIFEST} is not the one this checkpoint was published with"
        damages.append(Damage("manifest-replaced", MANIFEST, text))
    listed = {entry.path: entry for entry in manifest.files}
    safe = {path: entry for path, entry in listed.items() if is_safe(path)}
    unsafe = sorted(listed.keys() - safe)
    damages += [Damage("unsafe-path", path, f"{path}: unsafe path in the manifest") for path in unsafe]
    damages += [
        Damage("file-added", path, f"{path} was added") for path in sorted(present_files(directory) - set(listed))
    ]
    with ThreadPoolExecutor() as pool:
        checked = pool.map(lambda entry: check_file(directory, entry, digest), safe.values())
    return damages + [damage for damage in checked if damage]


def _sweep(folder: Path) -> None:
    """Remove what builds left behind whose process is gone."""
    for left in folder.iterdir():
        pid = left.name.partition("-")[0]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            shutil.rmtree(left, ignore_errors=True)


def _move_aside(directory: Path) -> None:
    names = (directory.with_name(f"{directory.name}.damaged-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    os.rename(directory, aside)
    log.warning("%s was damaged; it is kept as %s", directory, aside)


def statement_sha256(directory: Path) -> str | None:
    """Digest of the statement beside a checkpoint; None without one that can be read."""
    path = directory / ATTESTATION / STATEMENT
    if path.parent.is_symlink():
        return None
    try:
        return hashlib.sha256(read_bounded(path)).hexdigest()
    except (OSError, ValueError):
        return None
