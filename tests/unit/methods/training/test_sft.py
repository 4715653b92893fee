"""The loop of `sft` over a model in this process: which version a validation keeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xray
from tests.unit.methods.ppo.fake_model import FakeModel
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import Scores, StepTotals, TextBatch
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.sft import body as sft
from xray_runtime.methods.sft.config import SFTConfig, SFTValidation
from xray_runtime.methods.sft.kind import SFTInputs

SIZES = {"train": 8, "heldout": 2, "validation": 3}
LOSSES = [9.0, 3.0, 1.0, 1.0, 2.0]
"""Nats a token that each version gives to any text, the untrained one first."""


class Learner(FakeModel):
    """A WholeModel, as far as this stage uses it."""

    def __init__(self) -> None:
        self.updates = 0
        self.scored: list[int] = []

    def do_train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        self.updates += 1
        return {"nll": totals.tokens, "grad_norm": 1.0}

    def do_score(self, rows: TextBatch) -> Scores:
        self.scored.append(len(rows))
        each = LOSSES[self.updates] * rows.num_response_tokens() / len(rows)
        return Scores(nll=np.full(len(rows), each))

    def do_save(self, directory: Path, head_file: str | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "updates").write_text(str(self.updates))

    def do_save_state(self, directory: Path) -> None:
        directory.write_text(str(self.updates))

    def do_load_state(self, directory: Path) -> None:
        self.updates = int(directory.read_text())


@pytest.fixture
def inputs(tmp_path: Path) -> SFTInputs:
    for name in ("base", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    train_tokenizer(["question number 1", "an answer to it"] * 5, 300).save_pretrained(tmp_path / "base")
    for side, count in SIZES.items():
        asked = [[{"role": "user", "content": f"{side} {number}"}] for number in range(count)]
        rows = [Example(f"{side}{i}", f"{side}{i}", messages, "an answer") for i, messages in enumerate(asked)]
        write_pairs(tmp_path / "data" / f"{side}.arrow", Example, rows)
    (tmp_path / "data" / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    return SFTInputs(Model(tmp_path / "base"), Dataset(tmp_path / "data"))


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
