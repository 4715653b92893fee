"""Files to and from Workhorses on nodes with disks of their own (the nodes themselves: tests/e2e/test_cluster.py)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from tests.message_texts import Messages
from xray_runtime.cluster.protocols import Ref
from xray_runtime.cluster.staging import CHUNK_BYTES, FileReceiver, FileStager
from xray_runtime.models.weight_files import copy_tensors

T = TypeVar("T")


class Elsewhere(FileReceiver):
    """As on a node that does not see this one's disk."""

    def sees(self, path: Path) -> bool:
        return False


def collect(refs: list[Ref[T]], ranks: list[int]) -> list[T]:
    return list(ray.get(refs))


@pytest.fixture
def workhorses(cluster: None) -> Iterator[list[Any]]:
    """Ranks 0 and 1 on one node with a disk of its own, 2 on one that shares this disk, 3 on another with its own."""
    kinds = (Elsewhere, Elsewhere, FileReceiver, Elsewhere)
    actors = [ray.remote(kind).options(num_cpus=0).remote() for kind in kinds]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def stager(workhorses: list[Any], tmp_path: Path) -> FileStager:
    return FileStager(workhorses, ["x", "x", "y", "z"], collect, tmp_path)


def content(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_directories_are_staged_byte_for_byte(stager: FileStager, workhorses: list[Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "critic").mkdir(parents=True)
    (model / "weights").write_bytes(os.urandom(CHUNK_BYTES + 5))
    (model / "critic" / "empty").touch()
    assert [stager.is_remote(rank) for rank in range(4)] == [True, True, False, True]
    assert stager.peers() == [(0, 2), (1, 2), (0, 1), (0, 1)]
    places = stager.stage_in(model)
    assert places[2] == model
    assert places[0] == places[1] != places[3]
    assert content(places[0]) == content(places[3]) == content(model)
    assert stager.stage_in(model) == places  # once
    came = stager.stage_out(places, tmp_path / "out")
    assert set(came) == {0, 3}
    assert content(came[0]) == content(came[3]) == content(model)
    stager.forget(model)
    assert not places[0].exists()
    assert model.exists()


def test_nothing_is_left_when_a_workhorse_unloads(stager: FileStager, workhorses: list[Any], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    places = [stager.stage_in(tmp_path / "model"), stager.output_directories(tmp_path / "out")]
    ray.get([workhorse.remove_directories.remote() for workhorse in workhorses])
    assert not any(place[rank].exists() for place in places for rank in (0, 1, 3))
    assert (tmp_path / "model").exists()


def test_where_all_share_a_disk_nothing_moves(cluster: None, tmp_path: Path) -> None:
    [one, other] = workhorses = [ray.remote(FileReceiver).options(num_cpus=0).remote() for _ in range(2)]
    stager = FileStager(workhorses, ["x", "y"], collect, tmp_path)
    assert stager.peers() == [(0, 2), (1, 2)]
    assert stager.stage_in(tmp_path) == stager.output_directories(tmp_path) == [tmp_path, tmp_path]
    assert stager.stage_out([tmp_path, tmp_path], tmp_path) == {}
    ray.kill(one)
    ray.kill(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
def test_a_directory_of_another_user_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message_texts: Messages
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs = tmp_path / f"xray-staged-{os.getuid()}"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with message_texts.raises(PermissionError):
        FileReceiver().make_directory()
    assert not list(theirs.iterdir())


def test_tensors_of_two_copies_come_together(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for directory, a, b in ((ours, torch.ones(3), torch.zeros(2)), (theirs, torch.zeros(3), torch.full((2,), 7.0))):
        directory.mkdir()
        save_file({"a": a, "b": b}, directory / "model.safetensors")
    copy_tensors(theirs, ours, ["b"])
    found = load_file(ours / "model.safetensors")
    assert found["a"].tolist() == [1, 1, 1]
    assert found["b"].tolist() == [7, 7]
