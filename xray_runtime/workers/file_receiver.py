"""The Workhorse's side of file staging, without Ray: directories for files that a WholeModel copies to and from it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from xray_runtime.engines.training.disk import own_directory
from xray_runtime.store.manifest import LEDGER

CHUNK_BYTES = 64 * 2**20
"""Bytes of a chunk."""


class FileReceiver:
    """A Workhorse's side: directories that are removed with its model or when its process ends."""

    _own: Path | None = None

    def sees(self, path: Path) -> bool:
        return path.exists()

    def make_directory(self) -> Path:
        """A new, empty directory here. Raises PermissionError if another user owns the parent directory."""
        if self._own is None:
            root = Path(tempfile.gettempdir()) / f"xray-staged-{os.getuid()}"
            root.mkdir(mode=0o700, exist_ok=True)
            if root.lstat().st_uid != os.getuid():
                raise PermissionError(f"{root}: belongs to another user; set TMPDIR to another directory")
            self._own = own_directory(root)
        return Path(tempfile.mkdtemp(dir=self._own))

    def append_chunk(self, path: Path, chunk: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(chunk)

    def sizes(self, directory: Path) -> dict[str, int]:
        """Relative path → bytes of every file below `directory`."""
        return {str(path.relative_to(directory)): path.stat().st_size for path in model_files(directory)}

    def read_chunk(self, path: Path, offset: int) -> bytes:
        """The chunk of the file `path` that begins at `offset`."""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def remove_directory(self, directory: Path) -> None:
        """Remove a directory of `make_directory`."""
        shutil.rmtree(directory, ignore_errors=True)

    def remove_directories(self) -> None:
        """Remove all directories of `make_directory`."""
        if self._own is not None:
            # The lock file beside them stays.
            for directory in filter(Path.is_dir, self._own.iterdir()):
                self.remove_directory(directory)


def model_files(directory: Path) -> list[Path]:
    """All files but those of a policy's ledger, which no model reads."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in found if path.relative_to(directory).parts[0] != LEDGER)
