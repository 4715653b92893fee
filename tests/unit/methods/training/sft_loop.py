"""The model and the data of tests of `sft`'s loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.unit.methods.ppo.fake_model import FakeModel
from xray_runtime.data.batch import Scores, StepTotals, TextBatch
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.graph.artifacts import Dataset, Model
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


def make_sft_inputs(folder: Path) -> SFTInputs:
    for name in ("base", "data"):
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text("{}")
    train_tokenizer(["question number 1", "an answer to it"] * 5, 300).save_pretrained(folder / "base")
    for side, count in SIZES.items():
        asked = [[{"role": "user", "content": f"{side} {number}"}] for number in range(count)]
        rows = [Example(f"{side}{i}", f"{side}{i}", messages, "an answer") for i, messages in enumerate(asked)]
        write_pairs(folder / "data" / f"{side}.arrow", Example, rows)
    (folder / "data" / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    return SFTInputs(Model(folder / "base"), Dataset(folder / "data"))
