"""Snapshots in pieces: written under one layout and read under another, each element from one place, in one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from xray_runtime.engines import states
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.shards import Piece, read_shards

TENSORS = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(7.0), "c": torch.tensor(2.5)}


def layout(kind: str) -> list[dict[str, Piece]]:
    """What each rank holds of TENSORS."""
    whole = {name: Piece.of(tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    if kind == "alone":
        return [whole]
    if kind == "ZeRO-3 on 3":
        flat = {n: -(-p.size // 3) for n, p in whole.items()}
        return [
            {n: p.between(min(flat[n] * r, p.size), min(flat[n] * (r + 1), p.size)) for n, p in whole.items()}
            for r in range(3)
        ]
    # "a" by columns, unevenly; the others are on both ranks, which divide them when they write.
    return [whole | {"a": Piece.of((4, 6), 1, span)} for span in ((0, 2), (2, 6))]


def flattened(piece: Piece, tensor: Tensor) -> Tensor:
    box = tensor.reshape(piece.shape).narrow(piece.dim, piece.low, piece.high - piece.low)
    return box.flatten()[piece.start : piece.stop]


def write(directory: Path, kind: str, tensors: dict[str, Tensor] = TENSORS) -> None:
    for rank, held in enumerate(layout(kind)):
        pieces = {n: states.share(p, rank, 2) if kind == "TP 2" and n != "a" else p for n, p in held.items()}

        def read(kind: str, name: str, pieces: dict[str, Piece] = pieces) -> Tensor:
            return flattened(pieces[name], tensors[name] + (kind == "exp_avg"))

        each = {(kind, name): piece for name, piece in pieces.items() for kind in ("weight", "exp_avg")}
        states.write(directory, rank, each, 5, read)


KINDS = ["alone", "ZeRO-3 on 3", "TP 2"]


@pytest.mark.parametrize("came", KINDS)
@pytest.mark.parametrize("goes", KINDS)
def test_any_layout_reads_any_other_and_no_more_than_it_holds(came: str, goes: str, tmp_path: Path) -> None:
    write(tmp_path, came)
    for held in layout(goes):
        with states.Reader(tmp_path) as saved:
            assert saved.step == 5
            for kind in ("weight", "exp_avg"):
                for name, piece in held.items():
                    expected = flattened(piece, TENSORS[name] + (kind == "exp_avg"))
                    assert torch.equal(saved.read(kind, name, piece), expected)
            assert saved.bytes_read == 2 * 4 * sum(piece.size for piece in held.values())


def test_each_element_is_written_once_and_hashed_as_it_is_written(tmp_path: Path) -> None:
    write(tmp_path, "TP 2")
    shards = read_shards(tmp_path)
    assert [shard.sha256 for shard in shards] == [file_sha256(tmp_path / shard.file) for shard in shards]
    assert sum(piece.size for shard in shards for piece in shard.pieces.values()) == 2 * (24 + 7 + 1)
    # An ordinary safetensors file: the first rank's columns of "a", row by row.
    found = load_file(tmp_path / shards[0].file)
    assert found["weight/a"].tolist() == [0, 1, 6, 7, 12, 13, 18, 19]
    assert found["weight/b"].tolist() == [0, 1, 2]


def test_a_snapshot_of_another_model_or_without_a_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no snapshot of a model"):
        states.Reader(tmp_path)
    write(tmp_path, "ZeRO-3 on 3")
    with states.Reader(tmp_path) as saved, pytest.raises(ValueError, match="has no weight/d"):
        saved.read("weight", "d", Piece.of((2,)))
    with states.Reader(tmp_path) as saved, pytest.raises(ValueError, match=r"weight/a has shape \(4, 6\), not"):
        saved.read("weight", "a", Piece.of((6, 4)))
    for left in tmp_path.glob("rank-00001.*"):
        left.unlink()
    with states.Reader(tmp_path) as saved, pytest.raises(ValueError, match="has no weight/a, or only a part of it"):
        saved.read("weight", "a", Piece.of((4, 6)))


def test_a_snapshot_is_made_of_finite_tensors(tmp_path: Path) -> None:
    broken = TENSORS | {"b": torch.full((7,), math.inf)}
    with pytest.raises(NonFiniteError, match="the weight b has numbers that are not finite"):
        write(tmp_path, "alone", broken)
    # Without an index it is no shard.
    assert read_shards(tmp_path) == []
