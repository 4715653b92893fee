"""The loop of `sft` over a model in this process: which version a validation keeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import xray
from tests.unit.methods.ppo.recorder import FakeRecorder
from tests.unit.methods.training.sft_loop import LOSSES, SIZES, Learner, make_sft_inputs
from xray_runtime.cluster.stage import Stage
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.sft import body as sft
from xray_runtime.methods.sft.config import SFTConfig, SFTValidation
from xray_runtime.methods.sft.kind import SFTInputs


@pytest.fixture
def inputs(tmp_path: Path) -> SFTInputs:
    return make_sft_inputs(tmp_path)


def tuned(
    inputs: SFTInputs, out: Path, kept: Path, looks: SFTValidation | None, newest: Snapshot | None = None
) -> tuple[int, Learner, FakeRecorder]:
    model, recorder = Learner(), FakeRecorder(out, newest)

    @contextlib.contextmanager
    def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield dict.fromkeys(specs, model)

    out.mkdir()
    config = SFTConfig(steps=4, batch_size=2, validation=looks)
    stage = Stage("sft", 7, config, inputs, RuntimeConfig(), open_models, kept=kept)
    return sft.run(stage, out, recorder), model, recorder


def test_the_version_with_the_lowest_loss_is_kept(inputs: SFTInputs, tmp_path: Path) -> None:
    steps, model, recorder = tuned(inputs, tmp_path / "out", tmp_path / "kept", SFTValidation(every=1))
    # The third version is as good as the second; the first of equals is kept.
    assert (steps, (tmp_path / "out" / "updates").read_text()) == (2, "2")
    assert [p["sft/validation_loss"] for p in recorder.points if "sft/loss" in p] == pytest.approx(LOSSES[1:])
    record = json.loads((tmp_path / "out" / "validation.json").read_text())
    scores = dict(zip("1234", [-loss for loss in LOSSES[1:]], strict=True))
    assert record == {"kept": 2, "conversations": 3, "scores": pytest.approx(scores)}
    assert model.scored.count(SIZES["validation"]) == 4


def test_the_last_is_kept_where_it_is_wanted(inputs: SFTInputs, tmp_path: Path) -> None:
    looks = SFTValidation(every=3, num_conversations=1, keep="last")
    steps, model, recorder = tuned(inputs, tmp_path / "out", tmp_path / "kept", looks)
    assert (steps, (tmp_path / "out" / "updates").read_text()) == (4, "4")
    # After the third step and after the last one.
    assert ["sft/validation_loss" in p for p in recorder.points if "sft/loss" in p] == [False, False, True, True]
    assert model.scored.count(1) == 2
    assert not (tmp_path / "kept").exists()
    steps, _, recorder = tuned(inputs, tmp_path / "plain", tmp_path / "kept", None)
    assert (steps, (tmp_path / "plain" / "updates").read_text()) == (4, "4")
    assert not (tmp_path / "plain" / "validation.json").exists()
    assert not any("sft/validation_loss" in point for point in recorder.points)


@pytest.mark.parametrize("kept", ["kept", "elsewhere"])
def test_after_a_crash_the_version_of_before_it_is_found(inputs: SFTInputs, tmp_path: Path, kept: str) -> None:
    _, _, first = tuned(inputs, tmp_path / "out", tmp_path / "kept", SFTValidation(every=1))
    newest = first.snapshots[2]
    assert (newest.step, newest.state["validation"]["best"]) == (3, 2)
    steps, model, _ = tuned(inputs, tmp_path / "again", tmp_path / kept, SFTValidation(every=1), newest)
    assert (steps, model.updates, (tmp_path / "again" / "updates").read_text()) == (2, 4, "2")
    again, before = ((tmp_path / out / "validation.json").read_text() for out in ("again", "out"))
    assert again == before


def test_a_dataset_without_such_rows_is_refused_as_the_graph_is_written() -> None:
    with recording():
        base, data = xray.base(model="x"), xray.prepare(source="x.jsonl")
        with pytest.raises(ConfigError, match=r"^sft: validation: is not allowed: the dataset has no validation rows"):
            xray.sft(base, data, validation={"every": 5})
        xray.sft(base, xray.prepare(source="x.jsonl", validation_fraction=0.1), validation={"every": 5})
