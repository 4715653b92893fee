"""A trained model on disk, independent of its layout: pieces of float32 tensors by Hugging Face name.

Every rank writes one shard (see `shards`) with its pieces of `weight/NAME` and of the optimizer's states, such as
`exp_avg/NAME`, so that each element is in one shard, and hashes it as it writes. Under any layout a rank reads only the
byte ranges of what it holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xray_runtime.algorithms.finite import all_finite
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.signs import part_done
from xray_runtime.kernel.store.shards import Piece, Shard, index_path, overlaps, read_shards
from xray_runtime.models.tensor_file import float32_header

WEIGHT = "weight"
BYTES = 4
"""Size of a float32 element."""


def hugging_face_name(name: str) -> str:
    """A `HeadedLM` parameter's name in its causal LM's checkpoint; names of the scalar head stay `scalar.…`.

    A layer with an adapter is its `base_layer`.
    """
    return name.removeprefix("lm.").replace(".base_layer.", ".")


def share(piece: Piece, number: int, holders: int) -> Piece:
    """The part that the holder `number` of `holders` of an equal piece writes."""
    size = piece.size
    return piece.between(piece.start + size * number // holders, piece.start + size * (number + 1) // holders)


def write(
    directory: Path,
    rank: int,
    pieces: Mapping[tuple[str, str], Piece],
    step: int,
    held: Callable[[str, str], Tensor],
) -> None:
    """Write the shard of `rank`, one tensor at a time.

    Args:
        pieces: (kind, Hugging Face name) → what this rank writes of each tensor; some may be empty.
        step: number of optimizer steps done.
        held: (kind, name) → the flattened piece. It is called once for each, in order, also for empty ones.

    Raises:
        NonFiniteError: a tensor has numbers that are not finite.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"rank-{rank:05d}.safetensors"
    head, places = float32_header({f"{kind}/{name}": (p.size,) for (kind, name), p in pieces.items() if p.size})
    digest = hashlib.sha256(head)
    with file.open("wb") as out:
        out.write(head)
        for (kind, name), piece in pieces.items():
            tensor = held(kind, name)
            if not all_finite(tensor):
                raise NonFiniteError(f"the {kind} {name} has numbers that are not finite: no snapshot is made")
            assert tensor.shape == (piece.size,), f"{kind}/{name}: {tuple(tensor.shape)} is not {piece}"
            raw: Any = tensor.detach().cpu().float().contiguous().numpy()
            out.write(raw.data)
            digest.update(raw.data)
            part_done()
        out.flush()
        os.fsync(out.fileno())
        size = out.tell()
    found = {
        key: piece.model_copy(update={"offset": places[key].start})
        for (kind, name), piece in pieces.items()
        if (key := f"{kind}/{name}") in places
    }
    shard = Shard(file=file.name, sha256=digest.hexdigest(), size=size, step=step, pieces=found)
    write_atomic(index_path(file), shard.model_dump_json())


class Reader(AbstractContextManager["Reader"]):
    """The tensors of a snapshot."""

    def __init__(self, directory: Path) -> None:
        self._stack, self._directory = contextlib.ExitStack(), directory
        self._files: dict[str, Any] = {}
        self._pieces: dict[str, list[tuple[str, Piece]]] = {}
        self.bytes_read = 0
        shards = read_shards(directory)
        if not shards:
            raise FileNotFoundError(f"{directory}: has no snapshot of a model")
        self.step = shards[0].step
        for shard in shards:
            for key, piece in shard.pieces.items():
                self._pieces.setdefault(key, []).append((shard.file, piece))

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, kind: str, name: str, wanted: Piece) -> Tensor:
        """The piece `wanted` of a tensor, flattened; only its bytes are read. Raises ValueError: the snapshot has no
        such tensor, or not all of it."""
        key = f"{kind}/{name}"
        found = torch.empty(wanted.size, dtype=torch.float32)
        raw: Any = found.numpy()
        buffer, filled = memoryview(raw).cast("B"), 0
        for file, piece in self._pieces.get(key, ()):
            if piece.shape != wanted.shape:
                raise ValueError(f"the snapshot's {key} has shape {piece.shape}, not {wanted.shape}")
            for into, place, count in overlaps(wanted, piece):
                view = buffer[BYTES * into : BYTES * (into + count)]
                self._fill(file, view, piece.offset + BYTES * place)
                filled += count
        part_done()
        if filled != wanted.size or key not in self._pieces:
            raise ValueError(f"the snapshot has no {key}, or only a part of it: it belongs to another model")
        return found

    def _fill(self, file: str, view: memoryview, place: int) -> None:
        if file not in self._files:
            self._files[file] = self._stack.enter_context((self._directory / file).open("rb", buffering=0))
        opened = self._files[file]
        self.bytes_read += len(view)
        while view:
            count = os.preadv(opened.fileno(), [view], place)
            if not count:
                raise ValueError(f"{self._directory / file}: ends too early")
            view, place = view[count:], place + count
