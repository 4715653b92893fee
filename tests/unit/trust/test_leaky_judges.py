"""Who may judge a candidate, as the store shows it: gates close where nobody does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trust.synthetic import Lifecycle, judged, model, preferences, weights
from xray_runtime.kernel.history.promotion_check import Gate
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.methods.evaluate.config import EvaluationConfig, PromotionConfig
from xray_runtime.trust.gates import check_gates
from xray_runtime.trust.leaky_judges import leaky_judges

GOOD = PromotionConfig(min_win_rate=0.3, max_judge_drop=0.0)
CLOSED = "set gold, evaluate.judges or evaluate.heldout_reward_model, or promotion."


def reward_model(life: Lifecycle, stage: str, pairs: str, seed: str | None = None) -> None:
    head = {"reward_head/head.safetensors": weights(f"{seed or stage} head", 100)}
    files = {"config.json": b"{}", "model.safetensors": weights(seed or stage)} | head
    life.add(stage, "reward_model", files | {"reward.json": b"{}"}, {"policy": "sft", "data": pairs})


def pairs(life: Lifecycle, stage: str, numbers: range, source: str = "preferences") -> None:
    files = {"train.arrow": preferences(numbers), "heldout.arrow": preferences(range(90, 95)), "stats.json": b"{}"}
    life.add(stage, "preferences", files, {"policy": "sft", "data": "prepare"}, {"lr": 1e-3, "stage": stage})


@pytest.fixture
def life(tmp_path: Path) -> Lifecycle:
    """Its reward model learnt from pairs 0 to 19."""
    return Lifecycle(tmp_path, tracking=False).whole()


def evaluated(
    life: Lifecycle,
    judge: str | None,
    gold: str | None = None,
    people: float | None = None,
    verdicts: str | None = None,
    policy: str = "ppo-2",
    second: str | None = None,
    **sources: Any,
) -> tuple[Any, Any]:
    """(graph, evaluation) with one or two reward models and what else judges; `people` say that much."""
    models = {f"judges.{number}": model for number, model in enumerate((judge, second)) if model}
    terms = [{"model": role} for role in models]
    config = EvaluationConfig.model_validate({"judges": terms, "gold": gold, "num_prompts": 8, **sources})
    files = {"evaluation.json": b"", "samples.json": b"[]", "prompts.json": b"[]"}
    said = {name: judged(0.6, 0.2) for name in config.judging}
    said |= {"people": judged(0.6, people)} if people is not None else {}
    numbers = {"samples": 6, "kl": 1.0, "length_before": 8.0, "length_after": 8.0, "judges": said}
    files["evaluation.json"] = json.dumps(numbers | {"reward_before": 0.0, "reward_after": 1.0}).encode()
    roles = {"policy": policy, "against": "sft", "prompts": "prepare", "rewards.0": "reward"}
    roles |= models
    roles |= {"verdicts": verdicts} if verdicts else {}
    dumped = config.model_dump(mode="json") | {"runtime": {"device": "cpu", "threads": 2}}
    ref = life.add("evaluate-2", "evaluate", files, roles, dumped)
    graph = open_lineage_store(life.output, None).graph
    return graph, graph.nodes[ref.sha256]


def failed(graph: Any, evaluation: Any) -> dict[str, Gate]:
    candidate = graph.nodes[evaluation.manifest.parents["policy"]]
    return {g.name: g for g in check_gates(graph, candidate, evaluation, None, None, GOOD) if not g.passed}


def test_a_judge_of_other_pairs_counts(life: Lifecycle) -> None:
    pairs(life, "other-pairs", range(30, 50))
    reward_model(life, "other", "other-pairs")
    graph, evaluation = evaluated(life, "other")
    assert leaky_judges(graph, evaluation) == {}
    assert failed(graph, evaluation) == {}


def test_the_reward_that_was_trained_against_does_not(life: Lifecycle) -> None:
    graph, evaluation = evaluated(life, "reward")
    gates = failed(graph, evaluation)
    assert set(gates) == {"min_win_rate", "max_judge_drop"}
    for name, gate in gates.items():
        assert f"no judge of {evaluation.name} is independent (judges.0: ppo-" in gate.reason
        assert gate.reason.endswith(f"{name} cannot be checked ({CLOSED}{name}=null to go without)")


def test_nor_does_a_copy_of_it_under_another_name(life: Lifecycle) -> None:
    pairs(life, "other-pairs", range(30, 50))
    reward_model(life, "copy", "other-pairs", seed="reward")
    files = {f.path: f.sha256 for f in _node(life, "reward").manifest.files}
    again = {f.path: f.sha256 for f in _node(life, "copy").manifest.files}
    # The synthetic lifecycle draws the head of its own reward model from another seed.
    assert files["model.safetensors"] == again["model.safetensors"]
    assert leaky_judges(*evaluated(life, "copy")) == {}
    head = {"reward_head/head.safetensors": weights("head", 100)}
    same = {"config.json": b"{}", "model.safetensors": weights("reward"), "reward.json": b"{}"} | head
    life.add("twin", "reward_base", same, {"data": "prepare"})
    [why] = leaky_judges(*evaluated(life, "twin")).values()
    assert why.startswith("it has the weights of reward ")


def test_nor_one_of_pairs_that_stand_in_another_file_too(life: Lifecycle) -> None:
    pairs(life, "overlapping", range(18, 40))
    reward_model(life, "other", "overlapping")
    [why] = leaky_judges(*evaluated(life, "other")).values()
    assert why.startswith("2 of the pairs in overlapping ")


def test_nor_one_of_pairs_that_the_policy_learnt_from_itself(life: Lifecycle) -> None:
    """By DPO from pairs 0 to 19, or by KTO from verdicts on pairs 30 to 39: neither has a reward model."""
    pairs(life, "overlapping", range(18, 32))
    reward_model(life, "other", "overlapping")
    life.add("dpo", "dpo", model("dpo"), {"policy": "sft", "preferences": "preferences"})
    [why] = leaky_judges(*evaluated(life, "other", policy="dpo")).values()
    assert why.startswith("2 of the pairs in overlapping ")
    said = {"judgements.jsonl": b"", "pairs.arrow": preferences(range(30, 40))}
    life.add("judgements", "judgements", said, {}, type="Judgements")
    life.add("kto", "kto", model("kto"), {"policy": "sft", "verdicts": "judgements"})
    [why] = leaky_judges(*evaluated(life, "other", policy="kto")).values()
    assert why.startswith("2 of the pairs in overlapping ")
    pairs(life, "apart", range(60, 70))
    reward_model(life, "far", "apart")
    for policy in ("dpo", "kto"):
        assert leaky_judges(*evaluated(life, "far", policy=policy)) == {}


def test_a_judge_whose_pairs_are_unreadable_is_refused(life: Lifecycle) -> None:
    pairs(life, "other-pairs", range(30, 50))
    reward_model(life, "other", "other-pairs")
    graph, evaluation = evaluated(life, "other")
    path = _node(life, "other-pairs").directory / "train.arrow"
    path.write_bytes(b"damaged")
    [why] = leaky_judges(graph, evaluation).values()
    assert why.startswith("the pairs it was trained on cannot be compared (")
    # Or of which it is not known where it came from.
    del graph.nodes[_node(life, "other-pairs").sha256]
    [why] = leaky_judges(graph, evaluation).values()
    assert why.endswith("is not in the store")


def test_every_judge_is_looked_at(life: Lifecycle) -> None:
    """The first shows in the graph, the second in what stands in its pairs alone."""
    pairs(life, "overlapping", range(18, 40))
    reward_model(life, "other", "overlapping")
    found = leaky_judges(*evaluated(life, "reward", second="other"))
    assert found["judges.0"].endswith("was trained against it")
    assert found["judges.1"].startswith("2 of the pairs in overlapping ")


def test_a_judge_beside_one_that_does_not_count_still_counts(life: Lifecycle) -> None:
    graph, evaluation = evaluated(life, "reward", gold="vader")
    assert list(leaky_judges(graph, evaluation)) == ["judges.0"]
    assert failed(graph, evaluation) == {}


def test_every_judge_that_counts_is_named(life: Lifecycle) -> None:
    pairs(life, "other-pairs", range(30, 50))
    reward_model(life, "other", "other-pairs")
    graph, evaluation = evaluated(life, "other", gold="vader")
    candidate = graph.nodes[evaluation.manifest.parents["policy"]]
    [gate] = check_gates(graph, candidate, evaluation, None, None, GOOD.model_copy(update={"max_judge_drop": None}))[:1]
    assert gate.passed
    said = "24 won, 16 lost, 0 tied; win rate 0.600 of those not tied, 95% from 0.446"
    assert gate.reason == f"gold: {said}; judges.0: {said}; must be above 0.3"


def test_people_count_where_their_verdicts_are_an_input(life: Lifecycle) -> None:
    files = {"judgements.jsonl": b"", "stats.json": b"{}"}
    life.add("judgements", "judgements", files, {"policy-1": "ppo-2"}, type="Judgements")
    assert failed(*evaluated(life, None, people=0.2, verdicts="judgements")) == {}
    assert set(failed(*evaluated(life, None, people=-0.2, verdicts="judgements", num_prompts=9))) == {"max_judge_drop"}
    gates = failed(*evaluated(life, None, people=0.2, num_prompts=10))
    assert set(gates) == {"min_win_rate", "max_judge_drop"}
    assert all("has no judge" in gate.reason for gate in gates.values())


@pytest.mark.parametrize("judges", [None, [], "gold", {"gold": None}, {"gold": {"judges": 1}}])
def test_scores_that_are_no_judges_open_no_gate(life: Lifecycle, judges: Any) -> None:
    _, evaluation = evaluated(life, None, gold="vader")
    assert failed(*said_anew(life, evaluation)) == {}
    gates = failed(*said_anew(life, evaluation, judges=judges))
    assert set(gates) == {"min_win_rate", "max_judge_drop"}
    assert all("has no judge" in gate.reason for gate in gates.values())


@pytest.mark.parametrize("rewarded", [True, False])
@pytest.mark.parametrize(("delta", "holds"), [(0.2, True), (0.0, True), (-0.01, False), (None, False)])
def test_a_judge_sees_a_fall_with_and_without_a_reward(
    life: Lifecycle, delta: float | None, holds: bool, rewarded: bool
) -> None:
    _, evaluation = evaluated(life, None, gold="vader")
    reward = {} if rewarded else {"reward_before": None, "reward_after": None}
    found = said_anew(life, evaluation, judges={"gold": judged(0.6, 0.0) | {"delta": delta}}, **reward)
    assert set(failed(*found)) == (set() if holds else {"max_judge_drop"})


def said_anew(life: Lifecycle, evaluation: Any, **numbers: Any) -> tuple[Any, Any]:
    """The same evaluation with other numbers."""
    path = evaluation.directory / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | numbers))
    graph = open_lineage_store(life.output, None).graph
    return graph, graph.nodes[evaluation.sha256]


def test_where_nothing_judges_the_gates_are_closed(life: Lifecycle) -> None:
    graph, evaluation = evaluated(life, None)
    gates = failed(graph, evaluation)
    assert set(gates) == {"min_win_rate", "max_judge_drop"}
    assert gates["min_win_rate"].reason == (
        f"{evaluation.name} has no judge: min_win_rate cannot be checked ({CLOSED}min_win_rate=null to go without)"
    )


def _node(life: Lifecycle, stage: str) -> Any:
    graph = open_lineage_store(life.output, None).graph
    return next(node for node in graph.nodes.values() if node.manifest.stage == stage)
