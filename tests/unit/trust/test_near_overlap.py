"""Prompts of an evaluation of which parts stand in what an ancestor was trained on: found through the graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.trust.synthetic import Lifecycle, evaluation_files, judged_by, pair_file
from xray_runtime.data.pairs import Example, PreferenceExample
from xray_runtime.kernel.history.audit_check import Finding
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.trust.audit.checkpoints import audit

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


def test_twelve_common_words_are_no_match(tmp_path: Path) -> None:
    assert not found(tmp_path, SPAN.replace("coffee", "milk").replace("what", "which"))


def audited(life: Lifecycle, policy: str = "kto") -> dict[str, str]:
    """Code → detail of what an audit of the policy finds of its evaluations."""
    place, node = resolve(policy, life.output, None)
    found = audit(place, [node]).findings
    return {finding.code: finding.detail for finding in found if finding.code.startswith("evaluation-")}


def learned_from_verdicts(tmp_path: Path, *lines: str, benchmark: bool = False) -> Lifecycle:
    """A policy that learned from verdicts, and was judged on `Well, SPAN 1`, which its own data does not hold out."""
    life, asked = Lifecycle(tmp_path / "out", tracking=False), f"Well, {SPAN} 1"
    for name, prompt in (("prepare", asked), ("chats", "held out")):
        sides = {side: [Example("1", "1", said(text), "x")] for side, text in (("train", "else"), ("heldout", prompt))}
        files = {f"{side}.arrow": pair_file(Example, rows) for side, rows in sides.items()} | {"stats.json": b"{}"}
        life.add(name, "prepare", files, {}, {"source": name})
    life.add("sft", "sft", WEIGHTS, {"data": "chats"})
    judged = {"judgements.jsonl": "\n".join(lines).encode(), "pairs.arrow": pair_file(PreferenceExample)}
    life.add("judged", "judgements", judged, {"policy": "sft"}, type="Judgements")
    life.add("kto", "kto", WEIGHTS, {"policy": "sft", "verdicts": "judged", "data": "chats"})
    files, roles = evaluation_files([asked], 0.6, 0.2), {"policy": "kto", "prompts": "prepare"}
    if benchmark:
        files["benchmark.json"] = files.pop("evaluation.json")
        life.add("benchmark", "benchmark", files, roles)
    else:
        life.add("evaluate", "evaluate", files, roles | {"against": "sft"}, judged_by([]))
    return life


def verdict(text: str, said_of_it: str = "tie") -> str:
    return json.dumps({"prompt": said(text), "a": "yes", "b": "no", "verdict": said_of_it})


@pytest.mark.parametrize("benchmark", [False, True])
def test_verdicts_that_a_policy_learned_from_are_looked_at(tmp_path: Path, benchmark: bool) -> None:
    same, near = verdict(f"Well, {SPAN} 1"), verdict(f"So {SPAN}?")
    assert (
        "training part of kto"
        in audited(learned_from_verdicts(tmp_path / "same", same, benchmark=benchmark))["evaluation-overlap"]
    )
    assert (
        "training part of kto"
        in audited(learned_from_verdicts(tmp_path / "near", near, benchmark=benchmark))["evaluation-near-overlap"]
    )


def test_verdicts_that_taught_nothing_are_no_overlap(tmp_path: Path) -> None:
    skipped = verdict(f"Well, {SPAN} 1", "skip")
    assert audited(learned_from_verdicts(tmp_path / "skipped", skipped)) == {}
    # What the policy's own dataset holds out was left out of them.
    life = learned_from_verdicts(tmp_path / "out", verdict("held out"))
    asked, roles = ["held out"], {"policy": "kto", "against": "sft", "prompts": "chats"}
    life.add("again", "evaluate", evaluation_files(asked, 0.6, 0.2), roles, judged_by([]))
    assert audited(life) == {}


@pytest.mark.parametrize("line", ["{", "[]", '{"verdict": "a"}', '{"verdict": [], "prompt": 3}'])
def test_verdicts_that_cannot_be_read_are_named(tmp_path: Path, line: str) -> None:
    found = audited(learned_from_verdicts(tmp_path, line))
    assert "training part of kto" in found["evaluation-unchecked"]


def test_a_dataset_without_a_side_to_train_on_is_named(tmp_path: Path) -> None:
    life = learned_from_verdicts(tmp_path)
    files = {"heldout.arrow": pair_file(Example), "stats.json": b"{}"}
    life.add("own", "prepare", files, {}, {"source": "own"})
    life.add("tuned", "sft", WEIGHTS, {"base": "sft", "data": "own"})
    roles = {"policy": "tuned", "against": "sft", "prompts": "prepare"}
    life.add("again", "evaluate", evaluation_files([f"Well, {SPAN} 1"], 0.6, 0.2), roles, judged_by([]))
    assert "training part of own" in audited(life, "tuned")["evaluation-unchecked"]
