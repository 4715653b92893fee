"""Prompts of an evaluation of which parts stand in what an ancestor was trained on: found through the graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.lineage.synthetic import Lifecycle, evaluation_files, judged_by, pair_file
from xray_runtime.data.pairs import Example, PreferenceExample
from xray_runtime.lineage.audit.checkpoints import audit
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.reference import open_lineage_store

SPAN = "what would you say if somebody asked you to choose between tea and coffee"
WEIGHTS = {"model.safetensors": b"weights"}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def found(tmp_path: Path, told: str, rejected: str = "worse", asked: str = f"Well, {SPAN} 1") -> list[Finding]:
    """What an audit notes of an evaluation that asks `asked`, of a policy rewarded by a model trained on `told`."""
    life = Lifecycle(tmp_path / "out", tracking=False)
    chats = pair_file(Example, [Example("0", "0", said("something else"), "an answer")])
    held_out = pair_file(Example, [Example("1", "1", said(asked), "an answer")])
    life.add("prepare", "prepare", {"train.arrow": chats, "heldout.arrow": held_out, "stats.json": b"{}"}, {})
    pairs = pair_file(PreferenceExample, [PreferenceExample("0", said(told), "better", rejected)])
    files = {"train.arrow": pairs, "heldout.arrow": pair_file(PreferenceExample), "stats.json": b"{}"}
    life.add("sft", "sft", WEIGHTS, {"data": "prepare"})
    life.add("preferences", "preferences", files, {"policy": "sft", "data": "prepare"})
    life.add("reward", "reward_model", WEIGHTS, {"policy": "sft", "data": "preferences"})
    life.add("ppo", "ppo", WEIGHTS, {"policy": "sft", "prompts": "prepare", "rewards.0": "reward"})
    roles = {"policy": "ppo", "against": "sft", "prompts": "prepare", "rewards.0": "reward"}
    life.add("evaluate", "evaluate", evaluation_files([asked], 0.6, 0.2), roles, judged_by([]))
    result = audit(open_lineage_store(life.output, None))
    assert result.is_sound
    return [finding for finding in result.findings if finding.code == "evaluation-near-overlap"]


@pytest.mark.parametrize(
    ("told", "rejected"),
    [(f"I wonder: {SPAN.upper()}?", "worse"), ("a question", f"no, {SPAN.replace(' ', ', ')}!")],
    ids=["in a prompt", "in a rejected reply"],
)
def test_a_span_behind_the_reward_model_is_named(tmp_path: Path, told: str, rejected: str) -> None:
    (finding,) = found(tmp_path, told, rejected)
    assert finding.subject.startswith("evaluate ")
    assert "1 of 1 prompts (100.0%) share 13 words in a row" in finding.detail
    assert "training part of preferences" in finding.detail
    assert SPAN[:40] in finding.detail


def test_a_short_prompt_counts_as_a_whole(tmp_path: Path) -> None:
    assert found(tmp_path / "same", "HOW are you", asked="How are you?")
    assert not found(tmp_path / "part", "and how are you", asked="How are you?")


def test_twelve_words_in_common_are_none(tmp_path: Path) -> None:
    assert not found(tmp_path, SPAN.replace("coffee", "milk").replace("what", "which"))
