"""Shards: which elements pieces share, by a brute-force count; digests that are recorded, and damage that is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.unit.kernel.store.published import write_shard
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.shards import Piece, index_path, overlaps, read_shards, recorded_sha256, shard_problem


@st.composite
def piece_pairs(draw: st.DrawFn) -> tuple[Piece, Piece]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))

    def piece() -> Piece:
        dim = draw(st.integers(0, len(shape) - 1))
        low = draw(st.integers(0, shape[dim]))
        box = Piece.of(shape, dim, (low, draw(st.integers(low, shape[dim]))))
        start = draw(st.integers(0, box.size))
        return box.between(start, draw(st.integers(start, box.size)))

    return piece(), piece()


def elements(piece: Piece) -> list[int]:
    """The elements of a piece in the flattened whole tensor, by slicing one."""
    whole = np.arange(np.prod(piece.shape)).reshape(piece.shape)
    box = np.moveaxis(np.moveaxis(whole, piece.dim, 0)[piece.low : piece.high], 0, piece.dim)
    return box.flatten()[piece.start : piece.stop].tolist()


@given(piece_pairs())
def test_pieces_share_the_elements_that_slicing_says(pair: tuple[Piece, Piece]) -> None:
    wanted, held = pair
    theirs, ours = elements(held), elements(wanted)
    found = {into + i: place + i for into, place, count in overlaps(wanted, held) for i in range(count)}
    assert found == {i: theirs.index(element) for i, element in enumerate(ours) if element in theirs}


def test_a_scalar_is_one_element() -> None:
    assert list(overlaps(Piece.of(()), Piece.of(()))) == [(0, 0, 1)]


def test_the_recorded_digest_is_trusted_for_a_file_of_that_size_alone(tmp_path: Path) -> None:
    file = tmp_path / "rank-00000.safetensors"
    shard = write_shard(file, b"one")
    file.write_bytes(b"two")
    assert recorded_sha256(file) == shard.sha256 != file_sha256(file)
    file.write_bytes(b"three")
    assert recorded_sha256(file) == file_sha256(file)
    assert recorded_sha256(index_path(file)) == file_sha256(index_path(file))


def test_a_damaged_shard_is_named_in_one_line(tmp_path: Path) -> None:
    one, other = (write_shard(tmp_path / f"rank-0000{n}.safetensors", b"bytes") for n in range(2))
    assert read_shards(tmp_path) == [one, other]
    assert shard_problem(tmp_path, one) is None
    (tmp_path / other.file).write_bytes(b"bytez")
    assert shard_problem(tmp_path, other) == f"{tmp_path / other.file} was changed"
    (tmp_path / other.file).unlink()
    assert shard_problem(tmp_path, other) == f"{tmp_path / other.file}: No such file or directory"
    index_path(tmp_path / other.file).write_text("{")
    with pytest.raises(ValueError, match=r"rank-00001\.shard\.json: damaged or not a shard's index"):
        read_shards(tmp_path)


def test_a_shard_is_read_once_for_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_shard(tmp_path / "rank-00000.safetensors", b"bytes")
    assert shard_problem(tmp_path, shard) is None
    monkeypatch.setattr(
        "xray_runtime.kernel.store.shards.file_sha256", lambda path: pytest.fail(f"{path} is read again")
    )
    assert shard_problem(tmp_path, shard) is None
