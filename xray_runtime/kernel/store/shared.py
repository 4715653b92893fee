"""The shared store: directories under any URL that fsspec knows (S3, GCS, SFTP, a mounted disk), whole or absent.

    URL/NAME/INDEX          which copy counts, and the sha256 and size of each of its files
    URL/NAME/COPY/FILE…     one copy, named by its files' digests

An object store cannot rename, so the index is written last, in one object: an upload that was cut short has none and
does not count. Uploading the same directory again writes to the same place. Every byte that is fetched is hashed.

Temporary errors (a server that does not answer, a refused request) are retried for PATIENCE_S. Others (no bucket, no
permission, no space) are raised at once. Credentials come from the environment.
"""

from __future__ import annotations

import errno
import functools
import logging
import posixpath
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.files import sync
from xray_runtime.kernel.store.identity import digest, file_sha256
from xray_runtime.kernel.store.manifest import FileEntry, file_entries

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

INDEX = "index.json"
PATIENCE_S = 600.0
"""How long a failing request is repeated."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
TRANSFERS = 8
"""Files transferred at the same time."""
FINAL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
FINAL_NAMES = {"NoCredentialsError", "PartialCredentialsError", "NoRegionError"}
"""Errors of botocore, which need not be installed, that another attempt cannot help."""


class StorageError(RuntimeError):
    """The store cannot be used; the message is one line with its URL and the reason."""


class DamagedError(RuntimeError):
    """An object in the store differs from what was put there; the message names it."""


class Index(BaseModel):
    """The files of a directory in the store."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    copy_name: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    files: list[FileEntry]

    def sha256(self, path: str) -> str | None:
        """Digest of one file; None where there is no such file."""
        return next((entry.sha256 for entry in self.files if entry.path == path), None)


@functools.cache
def open_shared(url: str | None) -> SharedStore | None:
    """The store at `url`, one for each process; None where none is configured. Raises StorageError."""
    return None if url is None else SharedStore(url)


class SharedStore:
    """Directories and small objects below one URL. Raises StorageError: no installed package can open such a URL."""

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        # Most runs have no shared store, and every command imports this module.
        import fsspec

        self.url, self._patience_s = url.rstrip("/"), patience_s
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError, OSError) as error:
            raise StorageError(f"{self.url!r} is not allowed: {first_line(error)}") from None
        # Object stores (fsspec has them asynchronous) have no directories, and s3fs would make the bucket.
        self._has_directories = not self._fs.async_impl

    def check(self) -> None:
        """Write, read and remove a small object. Raises StorageError with the reason, without trying again."""
        probe, content = f"{self._root}/probe-{uuid.uuid4().hex}", b"xray"
        try:
            self._write(probe, content)
            if self._fs.cat_file(probe) != content:
                raise StorageError(f"{self.url!r} is not allowed: it does not return the bytes that were written")
            self._fs.rm_file(probe)
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"{self.url!r} cannot be used: {first_line(error)}") from error

    def read(self, name: str) -> bytes | None:
        """A small object; None where there is none."""
        try:
            content: bytes = self._patiently(f"reading {name}", lambda: self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Put a small object in its place."""
        self._patiently(f"writing {name}", lambda: self._write(self._path(name), content))

    def names(self, folder: str) -> list[str]:
        """Names directly in `folder`, sorted; empty where it does not exist."""

        def listed() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return sorted(
                    {posixpath.basename(p.rstrip("/")) for p in self._fs.ls(self._path(folder), detail=False)}
                )
            except FileNotFoundError:
                return []

        return self._patiently(f"listing {folder}", listed)

    def remove(self, name: str) -> None:
        """Remove a directory, its index first, so that one that is half removed does not count."""

        def removed() -> None:
            self._fs.invalidate_cache()
            for path in (self._path(f"{name}/{INDEX}"), self._path(name)):
                if self._fs.exists(path):
                    self._fs.rm(path, recursive=True)

        self._patiently(f"removing {name}", removed)

    def index(self, name: str) -> Index | None:
        """The index of a directory; None where no whole directory was put there."""
        content = self.read(f"{name}/{INDEX}")
        try:
            return None if content is None else Index.model_validate_json(content)
        except ValidationError:
            log.warning("%s/%s/%s: not an index; the directory is treated as missing", self.url, name, INDEX)
            return None

    def put(self, name: str, directory: Path, sha256: Callable[[Path], str] = file_sha256) -> None:
        """Upload a directory, whose files have these digests, in place of the one of this name. Its files must not
        change meanwhile."""
        files = file_entries(directory, sha256)
        copy = digest([[entry.path, entry.sha256] for entry in files])[:12]

        def send(path: str) -> None:
            target = self._path(f"{name}/{copy}/{path}")
            self._make_folder(target)
            self._patiently(f"writing {name}/{path}", lambda: self._fs.put_file(str(directory / path), target))

        _together(send, [entry.path for entry in files], not self._has_directories)
        self.write(f"{name}/{INDEX}", Index(copy_name=copy, files=files).model_dump_json().encode())

    def get(self, name: str, into: Path) -> Index | None:
        """Fetch a directory into the empty directory `into`; None where there is none. Raises as `get_files`."""
        index = self.index(name)
        if index is not None:
            self.get_files(name, index, index.files, into)
        return index

    def get_files(self, name: str, index: Index, files: Sequence[FileEntry], into: Path) -> None:
        """Fetch `files` of a directory into the directory `into`, each byte compared with its entry.

        Whoever can write to the store can write an index that fits: a caller must know by a signature what it trusts.

        Raises:
            DamagedError: a file is missing or not what its entry says.
            StorageError: the store cannot be reached.
        """
        unsafe = [entry.path for entry in files if not is_safe(entry.path)]
        if unsafe:
            raise DamagedError(f"{self.url}/{name}/{INDEX}: unsafe path {unsafe[0]!r}")

        def fetch(entry: FileEntry) -> None:
            source, target = f"{name}/{index.copy_name}/{entry.path}", into / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                size = self._patiently(f"reading {source}", lambda: self._fs.size(self._path(source)))
                if size != entry.size:
                    # It is not fetched: it may have any size.
                    raise DamagedError(f"{self.url}/{source} was changed")
                self._patiently(f"reading {source}", lambda: self._fs.get_file(self._path(source), str(target)))
            except FileNotFoundError:
                raise DamagedError(f"{self.url}/{source} is missing") from None
            if target.stat().st_size != entry.size or file_sha256(target) != entry.sha256:
                raise DamagedError(f"{self.url}/{source} was changed")
            sync(target)

        _together(fetch, files, not self._has_directories)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write(self, path: str, content: bytes) -> None:
        self._make_folder(path)
        self._fs.pipe_file(path, content)

    def _make_folder(self, path: str) -> None:
        if self._has_directories:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)

    def _patiently(self, what: str, call: Callable[[], T]) -> T:
        """`call()`, repeated while the store does not answer."""
        wait, deadline = FIRST_WAIT_S, time.monotonic() + self._patience_s
        while True:
            try:
                return call()
            except FileNotFoundError:
                raise
            except Exception as error:
                if _is_final(error) or time.monotonic() + wait > deadline:
                    raise StorageError(f"{self.url}: {what}: {first_line(error)}") from error
                log.warning("%s: %s: %s; trying again in %.0f s", self.url, what, first_line(error), wait)
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)


@dataclass(frozen=True)
class SharedFolder:
    """Small objects in one folder of a store. Raises StorageError."""

    store: SharedStore
    name: str

    def read(self) -> dict[str, bytes]:
        """Name → content of every object, in order of the names."""
        names = self.store.names(self.name)
        contents = _together(lambda name: self.store.read(f"{self.name}/{name}"), names, True)
        return {name: content for name, content in zip(names, contents, strict=True) if content is not None}

    def write(self, name: str, content: bytes) -> None:
        """Put an object in its place."""
        self.store.write(f"{self.name}/{name}", content)


def is_safe(path: str) -> bool:
    """Whether a relative path stays below where it starts."""
    parts = path.split("/")
    return "\0" not in path and not path.startswith("/") and all(part not in ("", ".", "..") for part in parts)


def _is_final(error: Exception) -> bool:
    return (
        isinstance(error, PermissionError)
        or (isinstance(error, OSError) and error.errno in FINAL_ERRNOS)
        or type(error).__name__ in FINAL_NAMES
    )


def _together(call: Callable[[T], R], items: Iterable[T], at_once: bool) -> list[R]:
    with ThreadPoolExecutor(TRANSFERS if at_once else 1) as pool:
        return list(pool.map(call, items))
