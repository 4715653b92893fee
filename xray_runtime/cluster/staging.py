"""File staging: copy directories to and from Workhorses on nodes that do not share this node's disk.

If every node sees the output directory, nothing is copied. Otherwise a WholeModel (`FileStager`) stages in the files
its Workhorses (`FileReceiver`) read, chunk by chunk through Ray's object store, and stages out the files they wrote.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from xray_runtime.cluster.protocols import WorkhorseHandle
from xray_runtime.engines.disk import own_directory
from xray_runtime.kernel.store.manifest import LEDGER

CHUNK_BYTES = 64 * 2**20


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
        return {str(path.relative_to(directory)): path.stat().st_size for path in _model_files(directory)}

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


def _model_files(directory: Path) -> list[Path]:
    """All files but those of a policy's ledger, which no model reads."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in paths if path.relative_to(directory).parts[0] != LEDGER)


class FileStager:
    """A WholeModel's side.

    Args:
        workhorses: in order of rank.
        nodes: node id of each Workhorse.
        collect: waits for answers of ranks, as `health.HealthMonitor.collect` does.
        shared: a directory that nodes may share; files are staged for nodes that do not see it.
    """

    def __init__(
        self,
        workhorses: Sequence[WorkhorseHandle],
        nodes: Sequence[str],
        collect: Callable[[list[Any], list[int]], list[Any]],
        shared: Path,
    ) -> None:
        # Not above: a Workhorse, which imports this module too, also works by itself where there is no Ray.
        from xray_runtime.cluster.pool.nodes import current_node, probe_file

        self._workhorses, self._nodes, self._collect = workhorses, nodes, collect
        self._staged: dict[Path, list[Path]] = {}
        # The first rank on a node receives for all ranks there.
        first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
        first.pop(current_node(), None)
        ranks = list(first.values())
        with probe_file(shared) if first else contextlib.nullcontext() as probe:
            sees = self._collect([workhorses[rank].sees.remote(probe) for rank in ranks], ranks) if probe else []
        self._receivers = {node: rank for (node, rank), seen in zip(first.items(), sees, strict=True) if not seen}
        """Node with its own disk → the rank that receives there."""

    def is_remote(self, rank: int) -> bool:
        """Whether a rank does not share this node's disk."""
        return self._nodes[rank] in self._receivers

    def peers(self) -> list[tuple[int, int]]:
        """For each rank (its number among the ranks that use the same disk, how many these are)."""
        return _peers([node if self.is_remote(rank) else None for rank, node in enumerate(self._nodes)])

    def node_peers(self) -> list[tuple[int, int]]:
        """The same for the ranks on one node, whose object store they share."""
        return _peers(self._nodes)

    def stage_in(self, directory: Path) -> list[Path]:
        """The path of a directory for each rank. It must not change any more: it is copied once and kept until it is
        forgotten."""
        if directory not in self._staged:
            self._staged[directory] = self._copy(directory)
        return self._staged[directory]

    def forget(self, directory: Path) -> None:
        """Remove the copies of a directory."""
        self.remove(self._staged.pop(directory))

    def _copy(self, directory: Path) -> list[Path]:
        import ray

        directories = self.output_directories(directory)
        ranks = list(self._receivers.values())
        for path in _model_files(directory) if ranks else []:
            with path.open("rb") as file:
                # An empty file is one empty chunk.
                chunk = file.read(CHUNK_BYTES)
                while True:
                    sent = ray.put(chunk)
                    name = path.relative_to(directory)
                    self._collect(
                        [self._workhorses[r].append_chunk.remote(directories[r] / name, sent) for r in ranks], ranks
                    )
                    if not (chunk := file.read(CHUNK_BYTES)):
                        break
        return directories

    def output_directories(self, directory: Path) -> list[Path]:
        """A directory for each rank to write files for `directory`, which `stage_out` copies here."""
        ranks = list(self._receivers.values())
        made = self._collect([self._workhorses[rank].make_directory.remote() for rank in ranks], ranks) if ranks else []
        of_node = dict(zip(self._receivers, made, strict=True))
        return [of_node.get(node, directory) for node in self._nodes]

    def stage_out(self, written: list[Path], into: Path) -> dict[int, Path]:
        """Receiving rank → a new directory in `into` with a copy of its directory in `written`."""
        staged = {}
        for rank in self._receivers.values():
            workhorse = self._workhorses[rank]
            into.mkdir(parents=True, exist_ok=True)
            copy = staged[rank] = Path(tempfile.mkdtemp(prefix=".staged-", dir=into))
            for name, size in self._collect([workhorse.sizes.remote(written[rank])], [rank])[0].items():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                with (copy / name).open("wb") as file:
                    while file.tell() < size:
                        call = workhorse.read_chunk.remote(written[rank] / name, file.tell())
                        file.write(self._collect([call], [rank])[0])
        return staged

    def remove(self, directories: list[Path]) -> None:
        """Remove directories of `output_directories`."""
        ranks = list(self._receivers.values())
        if ranks:
            calls = [self._workhorses[rank].remove_directory.remote(directories[rank]) for rank in ranks]
            self._collect(calls, ranks)


def _peers(places: Sequence[str | None]) -> list[tuple[int, int]]:
    return [(places[:rank].count(node), places.count(node)) for rank, node in enumerate(places)]


def merge_copy(copy: Path, directory: Path, names: Iterable[str], head_file: str | None) -> None:
    """Merge another node's `copy` of the model into `directory`, and remove the copy."""
    from xray_runtime.models.weight_files import copy_tensors, weight_files

    if not weight_files(directory):
        # Without a rank on this node, the first copy becomes the model.
        shutil.copytree(copy, directory, dirs_exist_ok=True)
    else:
        copy_tensors(copy, directory, names)
        if head_file is not None and (copy / head_file).exists():
            (directory / head_file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(copy / head_file, directory / head_file)
    shutil.rmtree(copy)
