"""What a call takes: inputs of the right types from the same workspace, and rewards and judges with their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import xray
from tests.message_texts import Messages
from tests.unit.kernel.graph.calls import brevity, other, parts, refused, terms
from xray.flows.promote import _source
from xray_runtime.kernel.graph.artifacts import Artifact, Model, Preferences
from xray_runtime.kernel.graph.graph import Graph, recording
from xray_runtime.kernel.graph.handles import Handle, reward


def test_inputs_come_by_position_or_by_name(graph: Graph) -> None:
    data, base, _ = parts()
    by_name = xray.sft(data=data, base=base, name="one").call
    by_position = xray.sft(base, data, name="two").call
    assert by_name is not None
    assert by_position is not None
    assert by_name.parents == by_position.parents == {"base": base, "data": data}


@pytest.mark.parametrize(
    "call",
    [
        lambda data, base: xray.sft(data, data),
        lambda data, base: xray.sft(base, base),
        lambda data, base: xray.sft("gpt2", data),
        lambda data, base: xray.sft(base, ["x"]),
        lambda data, base: xray.sft(base, data=["x"]),
        lambda data, base: xray.sft(xray.base, data),
        lambda data, base: xray.sft(base),  # type: ignore[call-arg]
        lambda data, base: xray.sft(data=data),  # type: ignore[call-arg]
        lambda data, base: xray.sft(base, None),
        lambda data, base: xray.sft(base, data, data),
        lambda data, base: xray.prepare(data),
        lambda data, base: xray.sft(base, data, data=data),
        lambda data, base: xray.ppo(base, data, refrence=base, rewards=[brevity]),  # type: ignore[call-arg]
        lambda data, base: xray.prepare(dta=data),  # type: ignore[call-arg]
        lambda data, base: xray.reward_model(base, data),
        lambda data, base: xray.evaluate(base, base, data, rewards=[base]),
        lambda data, base: xray.ppo(base, data, rewards=[brevity, 0.5 * data]),
        lambda data, base: xray.ppo(base, data, rewards=["x:y"]),
        lambda data, base: xray.preferences(source="gold", gold="vader"),
        lambda data, base: xray.preferences(source="ratings"),
        lambda data, base: xray.preferences(source="judgements"),
        lambda data, base: xray.dpo(base, xray.checkpoint("x"), base, loss="simpo"),
        lambda data, base: xray.kto(base),
        lambda data, base: xray.kto(base, verdicts=xray.checkpoint("x")),
        lambda data, base: xray.best_of_n(base, data),
    ],
)
def test_a_wrong_input_is_refused_as_the_graph_is_written(
    call: Callable[[Handle, Handle], Any], graph: Graph, message_texts: Messages
) -> None:
    data, base = xray.prepare(name="chats"), xray.base(model="x", name="llm")
    message_texts.check(refused(lambda: call(data, base)))
    assert list(graph.calls) == ["chats", "llm"]


def test_a_subtype_will_do_and_a_supertype_will_not(graph: Graph) -> None:
    class Chatty(Model):
        pass

    data = xray.prepare()
    chatty, anything = (Handle(graph, name, type, data.call) for name, type in (("chatty", Chatty), ("any", Artifact)))
    assert xray.sft(chatty, data).name == "sft"
    assert refused(lambda: xray.sft(anything, data)) == "sft-2.base: <Artifact any> is not allowed: must be a Model"


def test_a_checkpoint_that_a_plan_does_not_open_is_taken_on_trust(graph: Graph) -> None:
    found = xray.checkpoint("DIR#sft")
    assert (found.name, found.output, found.call) == ("DIR#sft", Artifact, None)
    assert xray.sft(found, xray.prepare()).name == "sft"


def test_a_checkpoint_of_a_known_type_is_checked(graph: Graph) -> None:
    found = Handle(graph, "prefs@ab12", Preferences, None)
    said = refused(lambda: xray.sft(found, xray.prepare()))
    assert said == "sft.base: <Preferences prefs@ab12> is not allowed: must be a Model"


def test_inputs_are_of_the_same_workspace(graph: Graph) -> None:
    with recording():
        elsewhere = xray.base(model="x")
    said = refused(lambda: xray.sft(elsewhere, xray.prepare()))
    assert said == (
        "sft.base: <Model base> belongs to another workspace: use its checkpoint, xray.checkpoint('DIR#base')"
    )


def test_rewards_have_weights(graph: Graph) -> None:
    data, base, kind = parts()
    safe = xray.reward_model(base, data=xray.preferences(source="dataset", path="z.jsonl"))
    sources = [kind, 0.5 * safe, 0.1 * xray.reward(brevity), xray.reward(other) * 2 * 0.25, brevity]
    policy = xray.ppo(base, data, rewards=sources)
    here = brevity.__module__
    assert terms(policy) == [
        {"model": "rewards.0", "weight": 1.0},
        {"model": "rewards.1", "weight": 0.5},
        {"function": f"{here}:brevity", "weight": 0.1},
        {"function": f"{here}:other", "weight": 0.5},
        {"function": f"{here}:brevity", "weight": 1.0},
    ]
    assert policy.call is not None
    assert policy.call.parents == {"policy": base, "prompts": data, "rewards.0": kind, "rewards.1": safe}
    assert policy.call.functions == {f"{here}:brevity": brevity, f"{here}:other": other}


def test_sources_have_fields_of_their_own(graph: Graph) -> None:
    data = xray.prepare(source="math.jsonl", columns=["answer", "task"])
    base = xray.base(model="x")
    kind = xray.reward_model(base, data=xray.preferences(source="dataset", path="a.jsonl"))
    safe = xray.reward_model(base, data=xray.preferences(source="dataset", path="z.jsonl"))
    sources = [
        2.0 * xray.reward([kind, safe], uncertainty=0.25),
        xray.reward(kind, when={"column": "task", "equals": "chat"}),
        0.5 * xray.reward(brevity, retries=0),
        xray.reward(verifier={"kind": "math", "column": "answer"}, weight=3.0),
    ]
    policy = xray.ppo(base, data, rewards=sources)
    assert terms(policy) == [
        {"models": ["rewards.0", "rewards.1"], "uncertainty": 0.25, "weight": 2.0},
        {"model": "rewards.0", "when": {"column": "task", "equals": "chat"}, "weight": 1.0},
        {"function": f"{brevity.__module__}:brevity", "retries": 0, "weight": 0.5},
        {"verifier": {"kind": "math", "column": "answer", "limit_s": 10.0}, "weight": 3.0},
    ]
    assert policy.call is not None
    # A model of two sources is one input.
    assert policy.call.parents == {"policy": base, "prompts": data, "rewards.0": kind, "rewards.1": safe}


def test_sources_of_an_evaluation_are_those_of_its_repetition(graph: Graph) -> None:
    """As a promotion asks candidate and champion."""
    data, base, kind = parts()
    safe = xray.reward_model(base, data=xray.preferences(source="dataset", path="z.jsonl"))
    rewards = [xray.reward([kind, safe], uncertainty=0.25), 0.5 * safe, {"verifier": {"kind": "regex", "pattern": "x"}}]
    first = xray.evaluate(base, base, data, rewards=rewards).call
    assert first is not None
    handles = {role: handle for role, handle in first.parents.items() if role.startswith("rewards.")}
    again = xray.compare(base, base, data, rewards=[_source(t, handles) for t in first.config_json()["rewards"]]).call
    assert again is not None
    assert again.config.rewards == first.config.rewards
    assert {role: again.parents[role] for role in handles} == handles


@pytest.mark.parametrize(
    "fields",
    [
        {"verifier": {"kind": "math", "column": "answr"}},
        {"function": "f", "when": {"column": "task", "equals": "a"}},
        {"verifier": {"kind": "maths"}},
        {"verifier": {"kind": "regex", "pattern": "("}},
        {"verifier": {"kind": "json_schema"}},
        {"verifier": {"kind": "code", "column": "answer", "memory": 3}},
        {"service": {"url": "https://me:secret@host/score"}},
        {"judge": {"url": "http://host/v1", "model": "m", "rubric": "r", "scale": [5, 1]}},
        {"judge": {"url": "http://host/v1", "model": "m", "rubric": "r", "opponents": 2}},
        {"service": {"url": "http://host"}, "retries": 1},
        {"service": {"url": "http://host"}, "function": "f"},
    ],
    ids=str,
)
def test_each_field_of_a_source_is_refused_in_one_line(
    fields: dict[str, Any], graph: Graph, message_texts: Messages
) -> None:
    data, base = xray.prepare(source="math.jsonl", columns=["answer"]), xray.base(model="x")
    message_texts.check(refused(lambda: xray.ppo(base, data, rewards=[fields])))


def test_a_judge_that_compares_needs_replies_to_compare(graph: Graph) -> None:
    data, base = xray.prepare(source="math.jsonl"), xray.base(model="x")
    judge = {"judge": {"url": "http://host/v1", "model": "m", "rubric": "r", "opponents": 2}}
    xray.ppo(base, data, rewards=[judge], method="grpo")
    xray.best_of_n(base, data, rewards=[judge])
    xray.preferences(policy=base, data=data, source="rewards", rewards=[judge])
    xray.ppo(base, data, rewards=[judge], method="grpo", samples_per_prompt=2)
    message = refused(lambda: xray.evaluate(base, base, data, rewards=[judge]))
    assert message.startswith("evaluate: rewards.0.judge: is not allowed with one reply per prompt")


def test_a_validations_judges_need_one_reply_to_a_prompt(graph: Graph) -> None:
    data, base = xray.prepare(source="math.jsonl", validation_fraction=0.1), xray.base(model="x")
    judge: dict[str, Any] = {"judge": {"url": "http://host/v1", "model": "m", "rubric": "r"}}
    given = {"rewards": [brevity], "method": "grpo", "validation": {"every": 1}}
    xray.ppo(base, data, judges=[judge], **given)
    judge["judge"]["opponents"] = 2
    message = refused(lambda: xray.ppo(base, data, judges=[judge], **given))
    assert message.startswith("ppo-2: judges.0.judge: is not allowed with one reply per prompt")


def test_a_single_source_needs_no_list(graph: Graph) -> None:
    data, base, kind = parts()
    assert terms(xray.ppo(base, data, rewards=kind)) == [{"model": "rewards.0", "weight": 1.0}]
    assert terms(xray.ppo(base, data, rewards=0.5 * kind)) == [{"model": "rewards.0", "weight": 0.5}]
    assert terms(xray.ppo(base, data, rewards=brevity)) == [
        {"function": f"{brevity.__module__}:brevity", "weight": 1.0}
    ]
    assert terms(xray.evaluate(base, base, data)) == []


@pytest.mark.parametrize(
    "rewards",
    [[], None, [0.0 * reward(brevity)], [{"model": "rewards.1"}], [{"weight": 1.0}], [float("nan") * reward(brevity)]],
)
def test_rewards_that_cannot_be_meant(rewards: Any, graph: Graph, message_texts: Messages) -> None:
    data, base = xray.prepare(), xray.base(model="x")
    message_texts.check(refused(lambda: xray.ppo(base, data, rewards=rewards)))


def test_rewards_of_a_call_replace_the_default_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", "mine")
    with recording(defaults={"rewards": [{"function": "mine:f"}]}):
        data, base, kind = parts()
        assert terms(xray.ppo(base, data)) == [{"function": "mine:f", "weight": 1.0}]
        assert terms(xray.ppo(base, data, rewards=[kind])) == [{"model": "rewards.0", "weight": 1.0}]
        assert terms(xray.evaluate(base, base, data, rewards=[])) == []
