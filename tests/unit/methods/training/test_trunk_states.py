"""States of a frozen trunk, kept for training: which are computed, and what rows get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.unit.methods.ppo.fake_model import FakeModel
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import PairBatch, Scores, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.common.training import trunk_states
from xray_runtime.methods.common.training.trunk_states import TrunkStates
from xray_runtime.methods.reward_model.config import RewardConfig

HIDDEN = 3
CHOSEN = [[1], [2, 3], [4, 5, 6], [7, 8], [9]]
REJECTED = [[11, 12], [13], [14], [15, 16, 17], [18]]
USED = np.array([0, 2, 3])


class Pairs:
    def take(self, rows: np.ndarray) -> TextBatch:
        return PairBatch(input_ids=Ragged.of(CHOSEN), rejected_ids=Ragged.of(REJECTED)).take(rows)


class Chosen:
    def take(self, rows: np.ndarray) -> TextBatch:
        return TextBatch(input_ids=Pairs().take(rows).input_ids)


class Trunk(FakeModel):
    """Of a token it gives the token, three times."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.dtype, self.asked = dtype, list[int]()

    def do_trunk(self, rows: TextBatch) -> Scores:
        ids = rows.input_ids
        self.asked.append(len(ids))
        return Scores(trunk=Ragged(np.repeat(ids.values[:, None], HIDDEN, 1).astype(self.dtype), ids.offsets))


def states(root: Path, rows: Any, used: np.ndarray = USED, layers: int | None = 1, **engine: Any) -> TrunkStates:
    config = RewardConfig(trainable_layers=layers, engine=EngineConfig(**engine))
    stage: Any = Stage("reward", 7, config, None, RuntimeConfig(), None)  # type: ignore[arg-type]
    return TrunkStates(stage, root / "model", root / "data", rows, used, FakeRecorder(root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    write_model(tmp_path, 0.0, 0.0)
    return tmp_path


def write_model(root: Path, below: float, above: float) -> None:
    (root / "model" / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "num_hidden_layers": 2}))
    weights = {"model.layers.0.w": below, "model.layers.1.w": above, "model.norm.weight": above}
    save_file({name: torch.tensor([value]) for name, value in weights.items()}, root / "model" / "model.safetensors")


def files(root: Path) -> list[Path]:
    return sorted((root / "data.tokens-").glob("trunk-*.states"))


def flat(column: Ragged) -> list[list[float]]:
    assert column.values.shape[1] == HIDDEN
    assert (column.values == column.values[:, :1]).all()
    return [row[:, 0].tolist() for row in column]


def test_each_side_of_a_pair_gets_its_states(root: Path) -> None:
    found, model = states(root, Pairs()), Trunk()
    assert found.columns([0]) == {}
    found.compute(model)  # type: ignore[arg-type]
    assert model.asked == [2 * len(USED)]
    columns = found.columns(np.array([3, 0]))
    assert columns.keys() == {"trunk", "rejected_trunk"}
    assert flat(columns["trunk"]) == [[7, 8], [1]]
    assert flat(columns["rejected_trunk"]) == [[15, 16, 17], [11, 12]]
    again = Trunk()
    other = states(root, Pairs())
    other.compute(again)  # type: ignore[arg-type]
    assert (again.asked, flat(other.columns([2])["trunk"])) == ([], [[4, 5, 6]])


@pytest.mark.parametrize(("chunk", "engine", "asked"), [(24, {}, [1, 1, 1]), (24, {"num_workhorses": 2}, [3])])
def test_they_are_asked_for_in_parts(
    root: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, engine: dict[str, Any], asked: list[int]
) -> None:
    """Each part has a row for every replica."""
    monkeypatch.setattr(trunk_states, "CHUNK_BYTES", chunk)
    found, model = states(root, Chosen(), **engine), Trunk()
    found.compute(model)  # type: ignore[arg-type]
    assert model.asked == asked
    columns = found.columns(USED)
    assert (columns.keys(), flat(columns["trunk"])) == ({"trunk"}, [CHOSEN[row] for row in USED])


def test_bfloat16_is_kept_as_its_bits(root: Path) -> None:
    found = states(root, Chosen(), precision="bfloat16")
    found.compute(Trunk(np.uint16))  # type: ignore[arg-type]
    assert files(root)[0].stat().st_size == 2 * HIDDEN * sum(len(CHOSEN[row]) for row in USED)
    assert found.columns([2])["trunk"].values.dtype == np.uint16
    with pytest.raises(TypeError, match="the trunk's states are float32"):
        states(root, Chosen(), np.array([1]), precision="bfloat16").compute(Trunk())  # type: ignore[arg-type]
    assert len(files(root)) == 1


def test_too_many_are_not_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 4 * HIDDEN * sum(len(CHOSEN[row]) for row in USED)
    for limit, kept in ((num_bytes, True), (num_bytes - 1, False)):
        monkeypatch.setattr(trunk_states, "MAX_BYTES", limit)
        found, model = states(root, Chosen()), Trunk()
        found.compute(model)  # type: ignore[arg-type]
        assert (bool(model.asked), bool(found.columns([0]))) == (kept, kept)


def test_without_a_frozen_trunk_there_are_none(root: Path) -> None:
    found, model = states(root, Chosen(), layers=None), Trunk()
    found.compute(model)  # type: ignore[arg-type]
    assert (model.asked, found.columns([0]), files(root)) == ([], {}, [])


def test_the_key_of_trunk_states(root: Path) -> None:
    def computed(*args: Any, **fields: Any) -> bool:
        model = Trunk()
        states(root, *args, **fields).compute(model)  # type: ignore[arg-type]
        return bool(model.asked)

    assert computed(Chosen())
    # Layers above the trunk may differ, those of it may not.
    write_model(root, 0.0, 1.0)
    assert not computed(Chosen())
    write_model(root, 1.0, 1.0)
    assert computed(Chosen())
    assert computed(Chosen(), np.array([0, 2]))
    assert computed(Pairs())
    assert computed(Chosen(), micro_batch_tokens=64)
    assert not computed(Chosen())


def test_a_file_that_is_cut_off_is_made_again(root: Path) -> None:
    states(root, Chosen()).compute(Trunk())  # type: ignore[arg-type]
    [file] = files(root)
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    found, model = states(root, Chosen()), Trunk()
    found.compute(model)  # type: ignore[arg-type]
    assert (model.asked, files(root)[0].read_bytes()) == ([len(USED)], whole)
    files(root)[0].write_bytes(whole[:-4])  # while it is open
    with pytest.raises(OSError, match="too short"):
        found.columns([3])
