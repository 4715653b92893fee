"""The benchmark beside TRL: who does other work is found, and fixed lengths are fixed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers import Side, differences
from benchmarks.peers_work import FIXED_TOKENS, of_fixed_length, share_of_e


def side(*curves: list[float]) -> Side:
    return Side("", curves=list(curves))


def test_equal_losses_are_the_same_work() -> None:
    assert differences("sft", side([2.0, 1.0]), side([2.01, 0.995])) == []
    # Near zero the difference counts against 0.1.
    assert differences("reward", side([0.0005]), side([0.0])) == []


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([2.0, 1.05], "sft, turn 0, update 1: the losses are 1.05000 and 1.00000"),
        ([2.0], "sft, turn 0: 1 and 2 updates"),
        ([float("nan"), 1.0], "sft, turn 0, update 0: the losses are nan and 2.00000"),
    ],
)
def test_other_losses_are_other_work(ours: list[float], said: str) -> None:
    assert differences("sft", side(ours), side([2.0, 1.0])) == [said]


def test_rewards_of_samples_may_differ_by_chance_alone() -> None:
    assert differences("grpo", side([0.10], [0.14], [0.12]), side([0.13], [0.11], [0.12])) == []
    assert len(differences("grpo", side([0.10], [0.14], [0.12]), side([0.53], [0.51], [0.52]))) == 1
    assert differences("grpo", side([0.1]), side([0.9])) == []


def test_texts_of_one_length(tiny_tokenizer: Any) -> None:
    cut = of_fixed_length(tiny_tokenizer)
    text = cut("hello there, how are you today " * 12)
    assert text is not None
    assert len(tiny_tokenizer(text, add_special_tokens=False)["input_ids"]) == FIXED_TOKENS
    assert cut("hello") is None


def test_the_share_of_a_letter() -> None:
    assert share_of_e([""] * 3, ["eel", "x", ""]) == [2 / 3, 0.0, 0.0]
