"""Shards of a snapshot: what one rank holds of a model, written, hashed and checked by ranks.

    NAME.safetensors   flat float32 pieces of tensors
    NAME.shard.json    the sha256 and size of that file and, for each piece, where it lies in its tensor and in the file

A piece is a range of the flattened *box*: the whole tensor, or its slice along one dimension. That covers a
tensor-parallel slice (a box), ZeRO's partitions (a range) and both together, so any layout can find what it needs among
the pieces of any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.store.digest_memory import FileState
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import WEIGHTS_INDEX

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INDEX_SUFFIX = ".shard.json"
M = TypeVar("M", bound=BaseModel)
Count = Annotated[int, Field(ge=0)]


class Piece(BaseModel):
    """Elements `start` to `stop` of the flattened slice `low` to `high` along `dim` of a tensor."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    shape: tuple[int, ...]
    """Shape of the whole tensor; a scalar has (1,)."""
    dim: Count = 0
    low: Count
    high: Count
    start: Count
    stop: Count
    offset: Count = 0
    """First byte in the file."""

    @classmethod
    def of(cls, shape: tuple[int, ...], dim: int = 0, span: tuple[int, int] | None = None) -> Piece:
        """The whole slice `span` along `dim`; without `span` the whole tensor."""
        shape = tuple(shape) or (1,)
        low, high = span if span is not None else (0, shape[dim])
        size = math.prod(shape) // shape[dim] * (high - low)
        return cls(shape=shape, dim=dim, low=low, high=high, start=0, stop=size)

    def between(self, start: int, stop: int) -> Piece:
        """Elements `start` to `stop` of the same flattened slice."""
        return self.model_copy(update={"start": start, "stop": max(start, stop)})

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def box_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.high - self.low, *self.shape[self.dim + 1 :])

    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first elements in the flattened whole tensor, lengths) of its contiguous runs, ascending."""
        import numpy as np

        inner = math.prod(self.shape[self.dim + 1 :])
        width, stride = (self.high - self.low) * inner, self.shape[self.dim] * inner
        if width == stride:
            return np.array([self.start]), np.array([self.size])
        rows = np.arange(self.start // width, -(-self.stop // width))
        begins, ends = np.maximum(rows * width, self.start), np.minimum((rows + 1) * width, self.stop)
        return rows * (stride - width) + self.low * inner + begins, ends - begins


def overlaps(wanted: Piece, held: Piece) -> Iterator[tuple[int, int, int]]:
    """(element of `wanted`, element of `held`, number) of each run that two pieces of one tensor share."""
    if wanted.dim == held.dim and (wanted.low, wanted.high) == (held.low, held.high):
        first, last = max(wanted.start, held.start), min(wanted.stop, held.stop)
        if first < last:
            yield first - wanted.start, first - held.start, last - first
        return
    if not wanted.size or not held.size:
        return
    import numpy as np

    (starts, sizes), (other_starts, other_sizes) = wanted.runs(), held.runs()
    # Elements of each piece before each of its runs.
    before, other_before = np.cumsum(sizes) - sizes, np.cumsum(other_sizes) - other_sizes
    firsts = np.searchsorted(other_starts + other_sizes, starts, "right")
    lasts = np.searchsorted(other_starts, starts + sizes, "left")
    for run in np.flatnonzero(firsts < lasts).tolist():
        for other in range(firsts[run], lasts[run]):
            first = max(starts[run], other_starts[other])
            last = min(starts[run] + sizes[run], other_starts[other] + other_sizes[other])
            into, place = before[run] + first - starts[run], other_before[other] + first - other_starts[other]
            yield int(into), int(place), int(last - first)


class Shard(BaseModel):
    """The index of one shard."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    file: Annotated[str, Field(pattern=r"^[^/]+$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Count
    """Bytes."""
    step: Count
    """Optimizer steps done."""
    pieces: dict[str, Piece]
    """KIND/NAME → piece."""


def index_path(file: Path) -> Path:
    return file.with_suffix(INDEX_SUFFIX)


def read_shards(directory: Path) -> list[Shard]:
    """The indices of the shards directly in `directory`, sorted by name. Raises ValueError: one is damaged."""
    return [_read(Shard, path, "a shard's index") for path in sorted(directory.glob(f"*{INDEX_SUFFIX}"))]


def recorded_sha256(file: Path) -> str:
    """The digest that a shard's index records, if the file has its size; of any other file the digest of its bytes.

    For those who trust the index (it is sealed) and leave it to the ranks to read the shards.
    """
    if index_path(file).is_file():
        shard = _read(Shard, index_path(file), "a shard's index")
        if shard.file == file.name and shard.size == file.stat().st_size:
            return shard.sha256
    return file_sha256(file)


class WeightsIndex(BaseModel):
    """Hugging Face's index of a checkpoint's files of weights."""

    metadata: dict[str, Any] = {}
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/]+$")]]

    @property
    def sha256(self) -> dict[str, str]:
        """The recorded digests of its files."""
        return dict(self.metadata.get("sha256", {}))


def read_index(directory: Path) -> WeightsIndex | None:
    """The index of a checkpoint's files of weights; None without one. Raises ValueError: it is damaged."""
    path = directory / WEIGHTS_INDEX
    return _read(WeightsIndex, path, "an index of weights") if path.is_file() else None


def written_sha256(file: Path) -> str:
    """The digest of a file that this run has just written: of a shard by the rank that wrote it, else of its bytes."""
    index = read_index(file.parent) if file.suffix == ".safetensors" else None
    recorded = index.sha256.get(file.name) if index is not None else None
    return recorded or recorded_sha256(file)


def shard_problem(directory: Path, shard: Shard) -> str | None:
    """Why a shard must not be read, in one line; None where its bytes are those that were written.

    A process reads a file once for this, as long as it does not change.
    """
    try:
        sha256 = _sha256_in(directory / shard.file, FileState.of(directory / shard.file))
    except OSError as error:
        return f"{directory / shard.file}: {error.strerror}"
    return None if sha256 == shard.sha256 else f"{directory / shard.file} was changed"


@cache
def _sha256_in(path: Path, state: FileState) -> str:
    return file_sha256(path)


def _read(kind: type[M], path: Path, what: str) -> M:
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path}: damaged or not {what} ({first_line(error)})") from error
