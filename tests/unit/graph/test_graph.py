"""Graphs as people write them: what a call takes and returns, and what is refused while it is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import xray
from xray.flows.promote import _source
from xray_runtime.config.engines import FrozenConfig, GeneratorConfig
from xray_runtime.config.rewards import RewardTerm
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.graph.artifacts import Artifact, Dataset, Model, Preferences, RewardModel
from xray_runtime.graph.current import current_graph, is_planning, planning
from xray_runtime.graph.graph import Graph, OnlyPlannedError, StageCall, recording
from xray_runtime.graph.handles import Handle, reward


def brevity(prompts: list[str], replies: list[str]) -> list[float]:
    return [-float(len(reply)) for reply in replies]


def other(prompts: list[str], replies: list[str]) -> list[float]:
    return [0.0 for _ in replies]


@pytest.fixture
def graph() -> Any:
    with recording(seed=3) as graph:
        yield graph


def parts(**data: Any) -> tuple[Handle, Handle, Handle]:
    """(data, base, a reward model)."""
    prompts, base = xray.prepare(source="x.jsonl", **data), xray.base(model="x")
    return prompts, base, xray.reward_model(base, data=xray.preferences(source="dataset", path="y.jsonl"))


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Handles, edges, names


def test_a_call_returns_a_handle_that_another_takes(graph: Graph) -> None:
    data, base, judge = parts()
    sft = xray.sft(base, data=data, steps=7)
    policy = xray.ppo(sft, data, reference=base, rewards=[judge])
    assert [type(handle) for handle in (data, base, judge, sft, policy)] == [Handle] * 5
    assert [handle.output for handle in (data, base, judge, sft)] == [Dataset, Model, RewardModel, Model]
    assert [repr(handle) for handle in (data, sft)] == ["<Dataset prepare>", "<Model sft>"]
    assert list(graph.calls) == ["prepare", "base", "preferences", "reward_model", "sft", "ppo"]
    call = graph.calls["ppo"]
    assert (call.kind, call.seed) == (xray.ppo, 3)
    assert call.parents == {"policy": sft, "prompts": data, "reference": base, "rewards.0": judge}
    assert sft.call is graph.calls["sft"]
    assert graph.calls["sft"].config_json()["steps"] == 7


def test_inputs_come_by_position_or_by_name(graph: Graph) -> None:
    data, base, _ = parts()
    by_name = xray.sft(data=data, base=base, name="one").call
    by_position = xray.sft(base, data, name="two").call
    assert by_name is not None
    assert by_position is not None
    assert by_name.parents == by_position.parents == {"base": base, "data": data}


def test_names_are_the_kinds_and_then_numbered(graph: Graph) -> None:
    names = [xray.base(model="x").name for _ in range(3)]
    assert names == ["base", "base-2", "base-3"]
    assert xray.base(model="x", name="mine").name == "mine"
    xray.base(model="x", name="base-4")
    assert xray.base(model="x").name == "base-5"


@pytest.mark.parametrize("name", ["", "../x", "a/b", "two words", ".hidden", "a\nb", "x" * 65, 7])
def test_a_name_is_part_of_file_names(name: Any, graph: Graph) -> None:
    said = refused(lambda: xray.base(model="x", name=name))
    assert said == f"name: {name!r} is not allowed: must match [A-Za-z0-9][A-Za-z0-9_.-]{{0,63}}"
    assert not graph.calls


def test_the_same_call_under_one_name_is_one_stage(graph: Graph) -> None:
    data, base, _ = parts()
    one = xray.sft(base, data, steps=7, name="mine")
    before = dict(graph.calls)
    assert xray.sft(base, data=data, steps=7, name="mine") is one
    assert graph.calls == before


@pytest.mark.parametrize(
    "again",
    [
        lambda base, data: xray.sft(base, data, steps=8, name="mine"),
        lambda base, data: xray.sft(xray.base(model="y"), data, steps=7, name="mine"),
        lambda base, data: xray.base(model="x", name="mine"),
    ],
)
def test_two_stages_of_one_name_are_refused(again: Callable[[Handle, Handle], Handle], graph: Graph) -> None:
    data, base, _ = parts()
    xray.sft(base, data, steps=7, name="mine")
    said = refused(lambda: again(base, data))
    assert said == "mine: two stages have this name; rename one with name=…"


def test_a_function_that_was_defined_again_is_another(graph: Graph) -> None:
    data, base, _ = parts()

    def made() -> Any:
        def mine(prompts: list[str], replies: list[str]) -> list[float]:
            return [0.0] * len(replies)

        return mine

    xray.ppo(base, data, rewards=[made()], name="mine")
    assert "two stages have this name" in refused(lambda: xray.ppo(base, data, rewards=[made()], name="mine"))


def test_what_could_not_be_submitted_is_no_stage() -> None:
    class Full(Graph):
        def submit(self, call: StageCall) -> None:
            if full:
                raise ConfigError("no room")

    full = True
    with Full() as graph:
        assert refused(lambda: xray.base(model="x", name="mine")) == "no room"
        assert not graph.calls
        full = False
        assert xray.base(model="y", name="mine").name == "mine"


def test_a_stage_needs_a_graph() -> None:
    said = refused(lambda: xray.base(model="x"))
    assert said == 'a stage can be called only inside `with xray.workspace("DIRECTORY"):`'


def test_the_innermost_graph_counts() -> None:
    with recording() as outer:
        with recording() as inner:
            assert current_graph() is inner
            xray.base(model="x")
        assert current_graph() is outer
    assert (list(outer.calls), list(inner.calls)) == ([], ["base"])


# Inputs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data, base: xray.sft(data, data), "sft.base: <Dataset chats> is not allowed: must be a Model"),
        (lambda data, base: xray.sft(base, base), "sft.data: <Model llm> is not allowed: must be a Dataset"),
        (
            lambda data, base: xray.sft("gpt2", data),
            "sft.base: 'gpt2' is not allowed: must be a Model, the result of a stage",
        ),
        (
            lambda data, base: xray.sft(base, ["x"]),
            "sft.data: ['x'] is not allowed: must be a Dataset, the result of a stage",
        ),
        (
            lambda data, base: xray.sft(base, data=["x"]),
            "sft.data: ['x'] is not allowed: must be a Dataset, the result of a stage",
        ),
        (
            lambda data, base: xray.sft(xray.base, data),
            "sft.base: base is not allowed: must be a Model, the result of a stage",
        ),
        (lambda data, base: xray.sft(base), "sft.data: is required: a Dataset"),
        (lambda data, base: xray.sft(data=data), "sft.base: is required: a Model"),
        (lambda data, base: xray.sft(base, None), "sft.data: is required: a Dataset"),
        (lambda data, base: xray.sft(base, data, data), "sft: 3 inputs are not allowed: sft takes base, data"),
        (lambda data, base: xray.prepare(data), "prepare: 1 inputs are not allowed: prepare takes none"),
        (lambda data, base: xray.sft(base, data, data=data), "sft.data: is set twice, by position and by name"),
        (
            lambda data, base: xray.ppo(base, data, refrence=base, rewards=[brevity]),
            "ppo.refrence: unknown input (did you mean reference?); ppo takes policy, prompts, reference, rewards, "
            "judges",
        ),
        (lambda data, base: xray.prepare(dta=data), "prepare.dta: unknown input; prepare takes none"),
        (
            lambda data, base: xray.reward_model(base, data),
            "reward_model.data: <Dataset chats> is not allowed: must be a Preferences",
        ),
        (
            lambda data, base: xray.evaluate(base, base, data, rewards=[base]),
            "evaluate.rewards.0: <Model llm> is not allowed: must be a RewardModel",
        ),
        (
            lambda data, base: xray.ppo(base, data, rewards=[brevity, 0.5 * data]),
            "ppo.rewards.1: <Dataset chats> is not allowed: must be a RewardModel",
        ),
        (
            lambda data, base: xray.ppo(base, data, rewards=["x:y"]),
            "ppo.rewards.0: 'x:y' is not allowed: must be a RewardModel, the result of a stage",
        ),
        (
            lambda data, base: xray.preferences(source="gold", gold="vader"),
            "preferences: policy: is required with source 'gold'",
        ),
        (lambda data, base: xray.preferences(source="ratings"), "preferences: data: is required with source 'ratings'"),
        (
            lambda data, base: xray.preferences(source="judgements"),
            "preferences: judgements: is required with source 'judgements'",
        ),
        (
            lambda data, base: xray.dpo(base, xray.checkpoint("x"), base, loss="simpo"),
            "dpo: reference: is not allowed with loss 'simpo', which does not use one",
        ),
        (lambda data, base: xray.kto(base), "kto: preferences: is required unless verdicts are given"),
        (
            lambda data, base: xray.kto(base, verdicts=xray.checkpoint("x")),
            "kto: data: is required with verdicts: the stage does not train on the dataset's held-out prompts",
        ),
        (
            lambda data, base: xray.best_of_n(base, data),
            "best_of_n: rewards: must have at least 1 item: a reward model, a function or another source",
        ),
    ],
)
def test_a_wrong_input_is_refused_as_the_graph_is_written(
    call: Callable[[Handle, Handle], Any], message: str, graph: Graph
) -> None:
    data, base = xray.prepare(name="chats"), xray.base(model="x", name="llm")
    assert refused(lambda: call(data, base)) == message
    assert list(graph.calls) == ["chats", "llm"]


def test_fields_are_refused_as_in_yaml(graph: Graph) -> None:
    data, base = xray.prepare(), xray.base(model="x")
    assert refused(lambda: xray.sft(base, data, steps=0)) == (
        "sft.steps: 0 is not allowed: must be greater than or equal to 1"
    )
    assert refused(lambda: xray.sft(base, data, stepps=3, name="mine")).startswith(
        "mine.stepps: unknown field (did you mean steps?); allowed here: batch_size, betas,"
    )
    assert refused(lambda: xray.sft(base, data, engine={"zero_stage": 9})) == (
        "sft.engine.zero_stage: 9 is not allowed: must be less than or equal to 3"
    )
    assert refused(lambda: xray.preferences(source="dpo", data=data)) == (
        "preferences.source: \"dpo\" is not allowed: must be one of 'gold', 'ratings', 'dataset', 'judgements', "
        "'curated', 'rewards'"
    )
    assert refused(lambda: xray.ppo(base, data, minibatch_size=48, rewards=[brevity])) == (
        "ppo: minibatch_size = 48 must divide prompts_per_iteration × samples_per_prompt = 64"
    )


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


def test_registering_takes_a_policy_and_its_evaluation(graph: Graph) -> None:
    data, base = xray.prepare(), xray.base(model="x")
    result = xray.evaluate(base, base, data)
    xray.register(base, result)
    assert refused(lambda: xray.register(data)) == "register.policy: <Dataset prepare> is not allowed: must be a Model"
    assert refused(lambda: xray.register(base, base)) == (
        "register.evaluation: <Model base> is not allowed: must be an Evaluation"
    )
    assert refused(lambda: xray.register("sft")) == (  # type: ignore[arg-type]
        "register.policy: 'sft' is not allowed: must be a Model, the result of a stage"
    )


# Rewards


DEFAULT_TERM = RewardTerm(function="f", weight=1.0).model_dump() | {"function": None}


def terms(handle: Handle) -> list[dict[str, Any]]:
    assert handle.call is not None
    return [
        {name: value for name, value in term.items() if name == "weight" or value != DEFAULT_TERM[name]}
        for term in handle.call.config_json()["rewards"]
    ]


def test_rewards_have_weights(graph: Graph) -> None:
    data, base, kind = parts()
    safe = xray.reward_model(base, data=xray.preferences(source="dataset", path="z.jsonl"))
    sources = [kind, 0.5 * safe, 0.1 * xray.reward(brevity), xray.reward(other) * 2 * 0.25, brevity]
    policy = xray.ppo(base, data, rewards=sources)
    here = __name__
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
        {"function": f"{__name__}:brevity", "retries": 0, "weight": 0.5},
        {"verifier": {"kind": "math", "column": "answer", "limit_s": 10.0}, "weight": 3.0},
    ]
    assert policy.call is not None
    # A model of two sources is one input.
    assert policy.call.parents == {"policy": base, "prompts": data, "rewards.0": kind, "rewards.1": safe}


def test_sources_of_an_evaluation_are_those_of_its_repetition(graph: Graph) -> None:
    """As a promotion asks candidate and champion."""
    data, base, kind = parts()
    safe = xray.reward_model(base, data=xray.preferences(source="dataset", path="z.jsonl"))
    rewards = [
        xray.reward([kind, safe], uncertainty=0.25),
        0.5 * safe,
        {"verifier": {"kind": "regex", "pattern": "x"}},
    ]
    first = xray.evaluate(base, base, data, rewards=rewards).call
    assert first is not None
    handles = {role: handle for role, handle in first.parents.items() if role.startswith("rewards.")}
    again = xray.compare(base, base, data, rewards=[_source(t, handles) for t in first.config_json()["rewards"]]).call
    assert again is not None
    assert again.config.rewards == first.config.rewards
    assert {role: again.parents[role] for role in handles} == handles


def test_a_function_takes_columns_that_the_dataset_has(graph: Graph) -> None:
    def right(prompts: Any, replies: Any, answer: Any, messages: Any, other: Any = None) -> list[float]:
        return [1.0] * len(replies)

    def wrong(prompts: Any, replies: Any, anser: Any) -> list[float]:
        return [1.0] * len(replies)

    def lonely(prompts: Any) -> list[float]:
        return [1.0] * len(prompts)

    data, base, _ = parts(columns=["answer", "task"])
    xray.ppo(base, prompts=data, rewards=[right])
    lost = "takes 'anser', which is not a column of the dataset: there are answer, task; add it to data.columns"
    for function, why in {wrong: lost, lonely: "must take the arguments prompts and replies, in this order"}.items():
        name = f"{__name__}:{function.__qualname__}"
        with pytest.raises(ConfigError) as error:
            xray.ppo(base, prompts=data, rewards=[right, 0.5 * xray.reward(function)], name="other")
        assert str(error.value) == f"other: rewards.1.function {name!r}: {why}"
        with pytest.raises(ConfigError, match=r"^judged: judges\.0\.function .*: (takes 'anser'|must take)"):
            xray.evaluate(base, base, data, judges=[function], name="judged")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"verifier": {"kind": "math", "column": "answr"}},
            "ppo: rewards.0.verifier.column: 'answr' is not allowed: the dataset has answer; add it to data.columns",
        ),
        (
            {"function": "f", "when": {"column": "task", "equals": "a"}},
            "ppo: rewards.0.when.column: 'task' is not allowed: the dataset has answer; add it to data.columns",
        ),
        (
            {"verifier": {"kind": "maths"}},
            "ppo.rewards.0.verifier.kind: \"maths\" is not allowed: must be one of 'math', 'regex', 'json_schema', "
            "'code'",
        ),
        (
            {"verifier": {"kind": "regex", "pattern": "("}},
            "ppo.rewards.0.verifier.pattern: '(' is not allowed: must be a regular expression (missing ), unterminated "
            "subpattern at position 0)",
        ),
        (
            {"verifier": {"kind": "json_schema"}},
            "ppo.rewards.0.verifier: one of definition and column must be set",
        ),
        (
            {"verifier": {"kind": "code", "column": "answer", "memory": 3}},
            "ppo.rewards.0.verifier.memory: unknown field (did you mean memory_mb?); allowed here: column, kind, "
            "limit_s, memory_mb",
        ),
        (
            {"service": {"url": "https://me:secret@host/score"}},
            "ppo.rewards.0.service.url: a login in 'https://host/score' is not allowed: the config is recorded and "
            "shown",
        ),
        (
            {"judge": {"url": "http://host/v1", "model": "m", "rubric": "r", "scale": [5, 1]}},
            "ppo.rewards.0.judge: scale = [5.0, 1.0] must ascend",
        ),
        (
            {"judge": {"url": "http://host/v1", "model": "m", "rubric": "r", "opponents": 2}},
            "ppo: rewards.0.judge.opponents: is not allowed with one reply per prompt: the judge compares "
            "several replies to a prompt",
        ),
        (
            {"service": {"url": "http://host"}, "retries": 1},
            "ppo.rewards.0: retries must be left out: it limits calls of a function",
        ),
        (
            {"service": {"url": "http://host"}, "function": "f"},
            "ppo.rewards.0: one of model, models, function, verifier, service and judge must be set",
        ),
    ],
)
def test_each_field_of_a_source_is_refused_in_one_line(fields: dict[str, Any], message: str, graph: Graph) -> None:
    data, base = xray.prepare(source="math.jsonl", columns=["answer"]), xray.base(model="x")
    assert refused(lambda: xray.ppo(base, data, rewards=[fields])) == message


def test_a_judge_that_compares_needs_replies_to_compare(graph: Graph) -> None:
    data, base = xray.prepare(source="math.jsonl"), xray.base(model="x")
    judge = {"judge": {"url": "http://host/v1", "model": "m", "rubric": "r", "opponents": 2}}
    xray.ppo(base, data, rewards=[judge], method="grpo")
    xray.best_of_n(base, data, rewards=[judge])
    xray.preferences(policy=base, data=data, source="rewards", rewards=[judge])
    xray.ppo(base, data, rewards=[judge], method="grpo", samples_per_prompt=2)
    message = refused(lambda: xray.evaluate(base, base, data, rewards=[judge]))
    assert message.startswith("evaluate: rewards.0.judge.opponents: is not allowed with one reply per prompt")


def test_what_judges_a_validation_has_one_reply_to_a_prompt(graph: Graph) -> None:
    data, base = xray.prepare(source="math.jsonl", validation_fraction=0.1), xray.base(model="x")
    judge: dict[str, Any] = {"judge": {"url": "http://host/v1", "model": "m", "rubric": "r"}}
    given = {"rewards": [brevity], "method": "grpo", "validation": {"every": 1}}
    xray.ppo(base, data, judges=[judge], **given)
    judge["judge"]["opponents"] = 2
    message = refused(lambda: xray.ppo(base, data, judges=[judge], **given))
    assert message.startswith("ppo-2: judges.0.judge.opponents: is not allowed with one reply per prompt")


def test_a_reference_is_for_losses_that_have_one(graph: Graph) -> None:
    data, base = xray.prepare(source="math.jsonl"), xray.base(model="x")
    pairs = xray.preferences(data=data, source="dataset", path="pairs.jsonl")
    xray.dpo(base, pairs, reference=base)
    xray.dpo(base, pairs, loss="simpo", beta=2.0)
    message = refused(lambda: xray.dpo(base, pairs, reference=base, loss="simpo", beta=2.0))
    assert message == "dpo-3: reference: is not allowed with loss 'simpo', which does not use one"


def test_a_single_source_needs_no_list(graph: Graph) -> None:
    data, base, kind = parts()
    assert terms(xray.ppo(base, data, rewards=kind)) == [{"model": "rewards.0", "weight": 1.0}]
    assert terms(xray.ppo(base, data, rewards=0.5 * kind)) == [{"model": "rewards.0", "weight": 0.5}]
    assert terms(xray.ppo(base, data, rewards=brevity)) == [{"function": f"{__name__}:brevity", "weight": 1.0}]
    assert terms(xray.evaluate(base, base, data)) == []


def test_yaml_names_functions(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", "mine.rewards")
    data, base, kind = parts()
    policy = xray.ppo(base, data, rewards=[kind, {"function": "mine.rewards:f", "weight": 2.0}])
    assert terms(policy) == [
        {"model": "rewards.0", "weight": 1.0},
        {"function": "mine.rewards:f", "weight": 2.0},
    ]
    assert policy.call is not None
    assert policy.call.functions == {}
    assert terms(xray.ppo(base, data, rewards=[xray.reward("mine.rewards:g")]))[0]["function"] == "mine.rewards:g"


@pytest.mark.parametrize("source", [{"function": "os:system"}, reward("os:system")])
def test_a_named_function_must_be_allowed(source: Any, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XRAY_ALLOWED_IMPORTS", raising=False)
    data, base, _ = parts()
    assert refused(lambda: xray.ppo(base, data, rewards=[source])) == (
        "ppo: 'os:system' is not allowed: it would import os, but XRAY_ALLOWED_IMPORTS in the environment allows "
        "nothing; to allow it: XRAY_ALLOWED_IMPORTS=os"
    )


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ("no colon", "'no colon'"),
        ("a:b.c", "'a:b.c'"),
        (3, "3"),
        (functools.partial(brevity), f"{functools.partial(brevity)!r}"),
    ],
    ids=["no colon", "a dotted name", "a number", "a partial"],  # an address would differ from worker to worker
)
def test_what_is_no_function_is_no_reward(function: Any, shown: str) -> None:
    assert refused(lambda: reward(function)) == (
        f"reward: {shown} is not allowed: must be a function, 'module:function', or reward models; or leave it "
        "out and set verifier, service or judge"
    )


def test_two_functions_of_one_name_are_refused(graph: Graph) -> None:
    """They would have one weight and one score."""
    data, base, _ = parts()
    lambdas = [lambda prompts, replies: [1.0] * len(replies), lambda prompts, replies: [2.0] * len(replies)]
    said = refused(lambda: xray.ppo(base, data, rewards=lambdas))
    name = f"{__name__}:test_two_functions_of_one_name_are_refused.<locals>.<lambda>"
    assert said == f"ppo.rewards.1: two functions are called {name!r}; rename one of them"


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "ppo: rewards: must have at least 1 item: a reward model, a function or another source"),
        (None, "ppo: rewards: must have at least 1 item: a reward model, a function or another source"),
        (
            [0.0 * reward(brevity)],
            "ppo: rewards: at least one weight must not be 0: sources of weight 0 are only logged",
        ),
        ([{"model": "rewards.1"}], "ppo: rewards.0.model: 'rewards.1' is not allowed: there is no such input"),
        ([{"weight": 1.0}], "ppo.rewards.0: one of model, models, function, verifier, service and judge must be set"),
        ([float("nan") * reward(brevity)], "ppo.rewards.0.weight: NaN is not allowed: must be a finite number"),
    ],
)
def test_rewards_that_cannot_be_meant(rewards: Any, message: str, graph: Graph) -> None:
    data, base = xray.prepare(), xray.base(model="x")
    assert refused(lambda: xray.ppo(base, data, rewards=rewards)) == message


def test_gold_is_a_function_too(graph: Graph) -> None:
    data, base = xray.prepare(source="math.jsonl"), xray.base(model="x")
    policy = xray.ppo(base, data, rewards=[other], gold=brevity)
    assert policy.call is not None
    name = f"{brevity.__module__}:brevity"
    assert policy.call.config.gold == name
    assert policy.call.functions == {name: brevity, f"{other.__module__}:other": other}
    # As a reward too it is one function.
    both = xray.ppo(base, data, rewards=[brevity], gold=brevity, name="both").call
    assert both is not None
    assert both.functions == {name: brevity}
    for handle in (
        xray.evaluate(policy, base, data, gold=brevity),
        xray.preferences(policy=base, data=data, source="gold", gold=brevity),
        xray.best_of_n(base, data, rewards=[other], gold=brevity),
    ):
        assert handle.call is not None
        assert (handle.call.config.gold, handle.call.functions[name]) == (name, brevity)
    with recording(defaults={"gold": brevity}):
        model = xray.base(model="x")
        by_default = xray.evaluate(model, model, xray.prepare(source="math.jsonl")).call
        assert by_default is not None
        assert by_default.functions == {name: brevity}
    for gold, message in {
        3: "e.gold: 3 is not allowed",
        "bleu": 'e.gold: "bleu" is not allowed',
        "other.module:f": "e: 'other.module:f' is not allowed: it would import other.module",
    }.items():
        assert refused(lambda gold=gold: xray.evaluate(base, base, data, name="e", gold=gold)).startswith(message)


def test_an_algorithm_is_a_function_too(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    data, base, _ = parts()

    def centred(rollout: Any) -> Any:
        return rollout.scores - rollout.scores.mean()

    call = xray.ppo(base, data, rewards=[brevity], advantages=centred).call
    assert call is not None
    name = f"{__name__}:test_an_algorithm_is_a_function_too.<locals>.centred"
    assert (call.config.advantages, call.config.critic_in_use, call.functions[name]) == (name, "none", centred)
    assert call.kind.functions(call.config) == [f"{__name__}:brevity", name]
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", "mine.losses")
    named = xray.ppo(base, data, rewards=[brevity], loss="mine.losses:sapo", critic="separate", name="named").call
    assert named is not None
    assert (named.config.loss, named.config.critic_in_use) == ("mine.losses:sapo", "separate")
    for fields, message in (
        ({"loss": "os:system"}, "ppo-2: 'os:system' is not allowed: it would import os"),
        ({"loss": "sapo"}, "ppo-2.loss: 'sapo' is not allowed: must be 'ppo', 'gspo', 'cispo' or 'module:function'"),
        ({"advantages": 3}, "ppo-2.advantages: 3 is not allowed"),
        ({"method": "grpo", "critic": "shared"}, "ppo-2: critic = 'shared' must be left out with advantages = 'grpo'"),
    ):
        said = refused(lambda fields=fields: xray.ppo(base, data, rewards=[brevity], **fields))
        assert said.startswith(message)


def test_only_numbers_weigh(graph: Graph) -> None:
    _, _, kind = parts()
    with pytest.raises(TypeError):
        kind * "2"  # type: ignore[operator]


def test_weights_are_for_rewards(graph: Graph) -> None:
    data, base, _ = parts()
    assert "must be a Model, the result of a stage" in refused(lambda: xray.sft(0.5 * base, data))
    seen = refused(lambda: xray.compare(base, base, data, seen=[0.5 * data]))
    assert seen.startswith("compare.seen.0: Weighted(")
    assert seen.endswith("must be an Artifact, the result of a stage")


# Defaults, the seed, plans


def test_defaults_go_to_the_stages_that_have_them() -> None:
    defaults = {"generator": {"engine": "transformers"}, "frozen": FrozenConfig(num_workhorses=2), "gold": "vader"}
    with recording(defaults=defaults) as graph:
        data, base, _ = parts()
        xray.sft(base, data)
        policy = xray.ppo(base, data, rewards=[brevity])
        own = xray.ppo(base, data, rewards=[brevity], generator=GeneratorConfig(engine="deepspeed"))
        pairs = xray.preferences(base, data)
    configs = {name: call.config for name, call in graph.calls.items()}
    assert configs[policy.name].generator.engine == "transformers"
    assert configs[policy.name].frozen.num_workhorses == 2
    assert configs[own.name].generator.engine == "deepspeed"
    assert (configs[pairs.name].gold, configs[pairs.name].generator.engine) == ("vader", "transformers")
    assert not hasattr(configs["sft"], "generator")


def test_rewards_of_a_call_replace_the_default_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", "mine")
    with recording(defaults={"rewards": [{"function": "mine:f"}]}):
        data, base, kind = parts()
        assert terms(xray.ppo(base, data)) == [{"function": "mine:f", "weight": 1.0}]
        assert terms(xray.ppo(base, data, rewards=[kind])) == [{"model": "rewards.0", "weight": 1.0}]
        assert terms(xray.evaluate(base, base, data, rewards=[])) == []


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"generatr": {}}, "generatr: unknown field (did you mean generator?): no stage kind has a field of this name"),
        ({"qqq": 1}, "qqq: unknown field: no stage kind has a field of this name"),
    ],
)
def test_a_default_that_nothing_reads_is_refused(defaults: dict[str, Any], message: str) -> None:
    assert refused(lambda: Graph(defaults=defaults)) == message


@pytest.mark.parametrize("seed", [-1, 2**31, 1.0, True, "1", None])
def test_a_seed_that_cannot_be_one(seed: Any) -> None:
    assert refused(lambda: Graph(seed)) == f"seed: {seed!r} is not allowed: must be a whole number from 0 to 2147483647"


def test_a_shortened_graph_has_the_same_stages() -> None:
    def written() -> None:
        data, base, kind = parts()
        xray.ppo(xray.sft(base, data, steps=90), data, rewards=[kind], iterations=90)

    with recording() as whole:
        written()
    with Graph(shorten=True) as short:
        written()
    assert list(short.calls) == list(whole.calls)
    assert (short.calls["sft"].config.steps, short.calls["ppo"].config.iterations) == (2, 2)
    assert short.calls["prepare"].config == whole.calls["prepare"].config


def test_a_plan_has_no_results(graph: Graph) -> None:
    base = xray.base(model="x")
    with pytest.raises(OnlyPlannedError, match=r"^base: has no result, because this graph is only planned$") as caught:
        base.result()
    assert caught.value.stage == "base"
    assert isinstance(caught.value, RuntimeError)


def test_planning_records_every_workspace(tmp_path: Path) -> None:
    """Servers, `until` and what goes into records are left out; nothing is written."""
    out = tmp_path / "a"
    assert is_planning() is None
    with planning() as graphs:
        options: dict[str, Any] = {"runtime": {"device": "cpu"}, "until": "base", "project": "p", "gates": {}}
        with xray.workspace(out, seed=5, generator={"engine": "transformers"}, **options) as opened:
            data, base, _ = parts()
            xray.sft(base, data)
            xray.register(base)
        with xray.workspace(str(tmp_path / "b")):
            xray.base(model="x")
    assert is_planning() is None
    assert [(directory, list(graph.calls)) for directory, graph in graphs] == [
        (out, ["prepare", "base", "preferences", "reward_model", "sft"]),
        (tmp_path / "b", ["base"]),
    ]
    first = graphs[0][1]
    assert opened is first
    assert (first.seed, first.runtime.device) == (5, "cpu")
    assert first.defaults == {"generator": {"engine": "transformers"}}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sed": 3}, "sed: unknown field: no stage kind has a field of this name"),
        ({"runtime": {"devise": "cpu"}}, "runtime.devise: unknown field (did you mean device?); allowed here: "),
        ({"seed": "3"}, "seed: '3' is not allowed: must be a whole number from 0 to 2147483647"),
    ],
)
def test_options_of_a_workspace_are_checked(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    def opened() -> None:
        with planning(), xray.workspace(tmp_path, **options):
            pass

    assert refused(opened).startswith(message)


def test_a_graph_has_a_runtime() -> None:
    assert Graph().runtime == RuntimeConfig()
