"""Functions that a call takes: as rewards, as `gold` and as parts of an algorithm, by name or as they are."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import xray
from tests.unit.kernel.graph.calls import brevity, other, parts, refused, terms
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.graph import Graph, recording
from xray_runtime.kernel.graph.handles import reward


def test_a_function_that_was_defined_again_is_another(graph: Graph) -> None:
    data, base, _ = parts()

    def made() -> Any:
        def mine(prompts: list[str], replies: list[str]) -> list[float]:
            return [0.0] * len(replies)

        return mine

    xray.ppo(base, data, rewards=[made()], name="mine")
    assert "two stages have this name" in refused(lambda: xray.ppo(base, data, rewards=[made()], name="mine"))


def test_a_function_takes_columns_that_the_dataset_has(graph: Graph) -> None:
    def right(prompts: Any, replies: Any, answer: Any, messages: Any, other: Any = None) -> list[float]:
        return [1.0] * len(replies)

    def wrong(prompts: Any, replies: Any, anser: Any) -> list[float]:
        return [1.0] * len(replies)

    def lonely(prompts: Any) -> list[float]:
        return [1.0] * len(prompts)

    data, base, _ = parts(columns=["answer", "task"])
    xray.ppo(base, prompts=data, rewards=[right])
    lost = "takes 'anser', which is not a column of the dataset: there are answer, task; add it to data.columns, "
    lost += "or name it prompts, replies, completions, responses, messages, columns, metadata, reasoning, answers"
    must = "must take the replies: name a parameter replies, completions or responses; its parameters are prompts"
    for function, why in {wrong: lost, lonely: f"{must}, and it is called by their names"}.items():
        name = f"{__name__}:{function.__qualname__}"
        with pytest.raises(ConfigError) as error:
            xray.ppo(base, prompts=data, rewards=[right, 0.5 * xray.reward(function)], name="other")
        assert str(error.value) == f"other: rewards.1.function {name!r}: {why}"
        with pytest.raises(ConfigError, match=r"^judged: judges\.0\.function .*: (takes 'anser'|must take)"):
            xray.evaluate(base, base, data, judges=[function], name="judged")


def test_yaml_names_functions(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", "mine.rewards")
    data, base, kind = parts()
    policy = xray.ppo(base, data, rewards=[kind, {"function": "mine.rewards:f", "weight": 2.0}])
    assert terms(policy) == [{"model": "rewards.0", "weight": 1.0}, {"function": "mine.rewards:f", "weight": 2.0}]
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


def test_two_functions_of_one_name_are_refused(graph: Graph) -> None:
    """They would have one weight and one score."""
    data, base, _ = parts()
    lambdas = [lambda prompts, replies: [1.0] * len(replies), lambda prompts, replies: [2.0] * len(replies)]
    said = refused(lambda: xray.ppo(base, data, rewards=lambdas))
    name = f"{__name__}:test_two_functions_of_one_name_are_refused.<locals>.<lambda>"
    assert said == f"ppo.rewards.1: two functions are called {name!r}; rename one of them"


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
    assert call.kind.functions_of(call.config) == [name, f"{brevity.__module__}:brevity"]
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", "mine.losses")
    named = xray.ppo(base, data, rewards=[brevity], loss="mine.losses:sapo", critic="separate", name="named").call
    assert named is not None
    assert (named.config.loss, named.config.critic_in_use) == ("mine.losses:sapo", "separate")
    for fields, message in (
        ({"loss": "os:system"}, "ppo-2: 'os:system' is not allowed: it would import os"),
        ({"loss": "mine"}, "ppo-2.loss: 'mine' is not allowed: must be 'ppo', 'gspo', 'cispo', 'clip_cov', 'dppo_kl'"),
        ({"advantages": 3}, "ppo-2.advantages: 3 is not allowed"),
        ({"method": "grpo", "critic": "shared"}, "ppo-2: critic = 'shared' must be left out with advantages = 'grpo'"),
    ):
        said = refused(lambda fields=fields: xray.ppo(base, data, rewards=[brevity], **fields))
        assert said.startswith(message)


class Scorer:
    def __call__(self, prompts: Any, replies: Any) -> list[float]:
        return [1.0] * len(replies)


UNKNOWN = "must take the replies"
NOT_A_FUNCTION = "is not allowed: must be a function"
CALLABLES: list[tuple[Any, str | None]] = [
    (lambda prompts, replies: [1.0] * len(replies), None),
    (lambda completions, prompts, **kwargs: [1.0] * len(completions), None),
    (lambda a, b: [1.0] * len(b), UNKNOWN),
    (lambda prompts: [1.0] * len(prompts), UNKNOWN),
    (len, UNKNOWN),
    (max, "its parameters cannot be read"),
    (Scorer, UNKNOWN),
    (Scorer(), NOT_A_FUNCTION),
    (functools.partial(brevity), NOT_A_FUNCTION),
    (brevity, None),
]
STAGES = {
    "ppo": lambda data, base, of: xray.ppo(base, data, rewards=[of], name="s"),
    "judges": lambda data, base, of: xray.evaluate(base, base, data, judges=[of], name="s"),
    "evaluate": lambda data, base, of: xray.evaluate(base, base, data, rewards=[of], name="s"),
    "best_of_n": lambda data, base, of: xray.best_of_n(base, data, rewards=[of], name="s"),
    "preferences": lambda data, base, of: xray.preferences(
        policy=base, data=data, source="rewards", rewards=[of], name="s"
    ),
    "gold of ppo": lambda data, base, of: xray.ppo(base, data, rewards=[brevity], gold=of, name="s"),
    "gold of best_of_n": lambda data, base, of: xray.best_of_n(base, data, rewards=[brevity], gold=of, name="s"),
    "gold of evaluate": lambda data, base, of: xray.evaluate(base, base, data, gold=of, name="s"),
    "gold of preferences": lambda data, base, of: xray.preferences(
        policy=base, data=data, source="gold", gold=of, name="s"
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("function", "why"), CALLABLES)
def test_each_stage_takes_a_function_or_refuses_it_at_the_call(
    graph: Graph, stage: str, function: Any, why: str | None
) -> None:
    data, base, _ = parts()
    if why is None:
        call = STAGES[stage](data, base, function).call
        assert call is not None
        assert function in call.functions.values()
        return
    said = refused(lambda: STAGES[stage](data, base, function))
    gold_alone = stage.startswith("gold") and why == NOT_A_FUNCTION and "s.gold: " in said
    assert why in said or gold_alone
    assert "\n" not in said
