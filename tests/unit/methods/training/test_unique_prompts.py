"""The distinct prompts of a dataset, which an iteration reads again for every reply and model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.methods.ppo.loop import make_inputs
from xray_runtime.data.pairs import TRAIN, Pairs
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.methods.common.training.prompts import UniquePrompts
from xray_runtime.models.causal_lm import load_tokenizer


def opened(root: Path) -> UniquePrompts:
    inputs = make_inputs(root)
    return UniquePrompts(load_tokenizer(inputs.policy.path), inputs.prompts.path / TRAIN, 64, process_seal())


def test_a_row_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = Pairs.__getitem__

    def counted(self: Pairs[Any], row: Any) -> Any:
        reads.append(row)
        return read(self, row)

    monkeypatch.setattr(Pairs, "__getitem__", counted)
    prompts = opened(tmp_path)
    reads.clear()
    both = [prompts[i] for i in (3, 3, 5, 5, 3)]
    assert prompts.columns([3, 5, 5]) == {}
    assert [messages[0]["content"] for messages, _ in both] == [f"question number {i}" for i in (3, 3, 5, 5, 3)]
    assert reads == [3, 5]


def test_a_readers_changes_stay_its_own(tmp_path: Path) -> None:
    prompts = opened(tmp_path)
    messages, ids = prompts[2]
    messages[0]["content"] = "another question"
    ids.append(0)
    assert prompts[2][0][0]["content"] == "question number 2"
    assert prompts[2][1] == ids[:-1]
