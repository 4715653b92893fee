"""Checkpoints whose weights are in several files: read, copied and written by several processes, hashed once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import WEIGHTS_INDEX
from xray_runtime.kernel.store.shards import written_sha256
from xray_runtime.models.weight_files import (
    check_finite,
    checked_digests,
    copy_weights,
    overwrite,
    same_trunk,
    tensors,
    weight_files,
    write_digests,
)

WEIGHTS = {f"model.layers.{number}.weight": torch.full((3,), float(number)) for number in range(5)}


def write(directory: Path, files: int = 3, weights: dict[str, Tensor] = WEIGHTS) -> Path:
    """A checkpoint in Hugging Face's form, its tensors dealt to `files`."""
    directory.mkdir()
    (directory / "config.json").write_text('{"num_hidden_layers": 5}')
    if files == 1:
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        return directory
    placed = {name: f"model-0000{n % files + 1}-of-0000{files}.safetensors" for n, name in enumerate(weights)}
    for file in set(placed.values()):
        save_file({n: t for n, t in weights.items() if placed[n] == file}, directory / file, {"format": "pt"})
    (directory / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {"total_size": 60}, "weight_map": placed}))
    return directory


def loaded(directory: Path) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in tensors(directory)}


def test_one_file_and_several_hold_the_same(tmp_path: Path) -> None:
    one, several = write(tmp_path / "one", 1), write(tmp_path / "several")
    assert loaded(one) == loaded(several) == {name: tensor.tolist() for name, tensor in WEIGHTS.items()}
    assert len(set(weight_files(several).values())) == 3
    assert [name for name, _ in tensors(several, {"model.layers.3.weight"})] == ["model.layers.3.weight"]
    assert same_trunk(one, several, 2)
    changed = write(tmp_path / "changed", weights=WEIGHTS | {"model.layers.2.weight": torch.ones(3)})
    assert not same_trunk(one, changed, 2)
    # The third of three tensors; two checkers have two and one of them.
    assert [same_trunk(one, changed, 2, number, 2) for number in (0, 1)] == [False, True]
    assert same_trunk(one, changed, 3)
    assert weight_files(tmp_path) == {}


def test_several_processes_copy_and_overwrite_the_files_in_turn(tmp_path: Path) -> None:
    source, out = write(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    for number in range(2):
        copy_weights(source, out, number, 2)
    assert loaded(out) == loaded(source)
    trained = {name: tensor + 0.5 for name, tensor in WEIGHTS.items() if "4" not in name}
    written = [overwrite(out, trained.items(), number, 2) for number in range(2)]
    # Two files are the first's, one is the second's.
    assert [len(names) for names in written] == [3, 1]
    assert loaded(out) == loaded(source) | {name: tensor.tolist() for name, tensor in trained.items()}
    digests = checked_digests(out, 0, 2) | checked_digests(out, 1, 2)
    write_digests(out, out, digests)
    assert digests == {file.name: file_sha256(file) for file in weight_files(out).values()}
    assert load_file(out / "model-00001-of-00003.safetensors")["model.layers.3.weight"].tolist() == [3.5] * 3


def test_recorded_digests_are_of_this_directory_and_spare_hashing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "source"), tmp_path / "out"
    write_digests(source, source, checked_digests(source, 0, 1))
    file = next(source.glob("model-*"))
    with monkeypatch.context() as patch:
        patch.setattr(
            "xray_runtime.kernel.store.shards.file_sha256", lambda path: pytest.fail(f"{path} is hashed again")
        )
        assert len(written_sha256(file)) == 64
    # A copy will be overwritten, so it takes over none.
    out.mkdir()
    copy_weights(source, out)
    index = json.loads((out / WEIGHTS_INDEX).read_text())
    assert index["metadata"] == {"total_size": 60}
    (out / file.name).write_bytes(b"other")
    assert written_sha256(out / file.name) == file_sha256(out / file.name)


def test_a_file_that_a_rank_looked_at_is_not_looked_at_again(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken", weights=WEIGHTS | {"model.layers.1.weight": torch.full((3,), math.nan)})
    with pytest.raises(NonFiniteError, match=r"^broken/model-00002-of-00003\.safetensors: model\.layers\.1"):
        check_finite(tmp_path)
    with pytest.raises(NonFiniteError, match=r"^model-00002-of-00003\.safetensors: model\.layers\.1"):
        checked_digests(broken, 1, 3)
    whole = write(tmp_path / "whole")
    write_digests(whole, whole, checked_digests(whole, 0, 1))
    for file in weight_files(whole).values():
        file.write_bytes(b"nobody reads this")
    check_finite(whole)


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    (directory / WEIGHTS_INDEX).write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: damaged or not an index of weights"):
        weight_files(directory)
