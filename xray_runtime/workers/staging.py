"""Directories to and from Workhorses on nodes that do not share this one's disk.

Where every node sees the output directory nothing is carried. Elsewhere a WholeModel sends each node what its
Workhorses read there, piece by piece through Ray's object store, and brings back what they wrote.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from xray_runtime.engines.training.disk import own_directory
from xray_runtime.workers.nodes import here, probe_file

CHUNK_BYTES = 64 * 2**20
"""Bytes on their way at a time."""


class FileReceiver:
    """A Workhorse's end: directories of its process's own. They go with its model, or with it."""

    _own: Path | None = None

    def sees(self, path: Path) -> bool:
        """Whether `path` is there."""
        return path.exists()

    def make_directory(self) -> Path:
        """A new, empty directory here. Raises PermissionError where another user made the one it would lie in."""
        if self._own is None:
            root = Path(tempfile.gettempdir()) / f"xray-carried-{os.getuid()}"
            root.mkdir(mode=0o700, exist_ok=True)
            if root.lstat().st_uid != os.getuid():
                raise PermissionError(f"{root}: is another user's; name another directory in TMPDIR")
            self._own = own_directory(root)
        return Path(tempfile.mkdtemp(dir=self._own))

    def append_chunk(self, path: Path, piece: bytes) -> None:
        """Append `piece` to the file `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(piece)

    def sizes(self, place: Path) -> dict[str, int]:
        """Relative path → bytes of every file below `place`."""
        return {str(path.relative_to(place)): path.stat().st_size for path in _files(place)}

    def read_chunk(self, path: Path, offset: int) -> bytes:
        """The piece of the file `path` that begins at `offset`."""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def drop(self, place: Path | None = None) -> None:
        """Remove a directory of `make_place`; without `place`, all of them."""
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)
        elif self._own is not None:
            for each in self._own.iterdir():
                shutil.rmtree(each, ignore_errors=True)


class FileStager:
    """A WholeModel's end.

    Args:
        workhorses: in order of rank.
        nodes: the id of the node that each is on.
        collect: gets the answers of calls to these ranks, as `Watch.collect`.
        seen: a directory that the nodes may share; who does not see it is carried for.
    """

    def __init__(
        self,
        workhorses: Sequence[Any],
        nodes: Sequence[str],
        collect: Callable[[list[Any], list[int]], list[Any]],
        seen: Path,
    ) -> None:
        self._workhorses, self._nodes, self._collect = workhorses, nodes, collect
        self._brought: dict[Path, list[Path]] = {}
        # The first rank on a node carries for all that are there.
        first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
        first.pop(here(), None)
        with probe_file(seen) if first else contextlib.nullcontext() as mark:
            self._porters = {node: rank for node, rank in first.items() if not self._ask([rank], "sees", [(mark,)])[0]}

    def is_remote(self, rank: int) -> bool:
        """Whether a rank reads and writes on a disk of its own."""
        return self._nodes[rank] in self._porters

    def leaders(self) -> list[int]:
        """One rank for each disk: this process's (where any rank is there) first."""
        not_away = [rank for rank in range(len(self._nodes)) if not self.is_remote(rank)]
        return not_away[:1] + sorted(self._porters.values())

    def bring(self, directory: Path) -> list[Path]:
        """Where each rank finds the directory, which does not change any more."""
        if directory not in self._brought:
            self._brought[directory] = self.lend(directory)
        return self._brought[directory]

    def lend(self, directory: Path) -> list[Path]:
        """As `bring`; `drop` when it is not needed any more."""
        places = self.places(directory)
        ranks = list(self._porters.values())
        for path in _files(directory) if ranks else []:
            with path.open("rb") as file:
                # An empty file is a piece too.
                piece = file.read(CHUNK_BYTES)
                while True:
                    sent = ray.put(piece)
                    self._ask(ranks, "append_chunk", [(places[r] / path.relative_to(directory), sent) for r in ranks])
                    if not (piece := file.read(CHUNK_BYTES)):
                        break
        return places

    def places(self, directory: Path) -> list[Path]:
        """Where each rank may write what is meant for `directory`; `fetch` brings it here."""
        ranks = list(self._porters.values())
        made = dict(zip(self._porters, self._ask(ranks, "make_directory", [() for _ in ranks]), strict=True))
        return [made.get(node, directory) for node in self._nodes]

    def fetch(self, places: list[Path], into: Path) -> dict[int, Path]:
        """Rank that carries → a new directory in `into` with what lies in its place of `places`."""
        found = {}
        for rank in self._porters.values():
            into.mkdir(parents=True, exist_ok=True)
            came = found[rank] = Path(tempfile.mkdtemp(prefix=".carried-", dir=into))
            [sizes] = self._ask([rank], "sizes", [(places[rank],)])
            for name, size in sizes.items():
                (came / name).parent.mkdir(parents=True, exist_ok=True)
                with (came / name).open("wb") as file:
                    while file.tell() < size:
                        file.write(self._ask([rank], "read_chunk", [(places[rank] / name, file.tell())])[0])
        return found

    def drop(self, places: list[Path]) -> None:
        """Remove what `lend` or `places` made."""
        ranks = list(self._porters.values())
        self._ask(ranks, "drop", [(places[rank],) for rank in ranks])

    def _ask(self, ranks: list[int], method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        calls = [getattr(self._workhorses[r], method).remote(*a) for r, a in zip(ranks, arguments, strict=True)]
        return self._collect(calls, ranks) if calls else []


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
