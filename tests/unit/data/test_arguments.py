"""Users' functions are called by the names of their parameters; what cannot be known is refused before a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.message_texts import Messages
from xray_runtime.kernel.arguments import FIELDS, Arguments
from xray_runtime.rewards.source import Batch

P, R, A = ["p1", "p2"], ["r1", "r2"], ["a1", "a2"]
BATCH = Batch(P, R, [[{"role": "user", "content": "p1"}], []], {"answer": A, "ground_truth": A}, {"step": 3})


class Scorer:
    def __call__(self, completions: Any, prompts: Any) -> Any:
        return completions, prompts

    def method(self, completions: Any, answer: Any) -> Any:
        return completions, answer

    @classmethod
    def of_class(cls, responses: Any) -> Any:
        return responses

    @staticmethod
    def static(replies: Any, prompts: Any) -> Any:
        return replies, prompts


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def trl(completions: Any, prompts: Any, **kwargs: Any) -> Any:
    return completions, prompts, set(kwargs)


def with_truth(completions: Any, ground_truth: Any, **kwargs: Any) -> Any:
    return completions, ground_truth, set(kwargs)


def positional_only(completions: Any, prompts: Any, /) -> Any:
    return completions, prompts


def with_default(completions: Any, spare: Any = 7, answer: Any = None, /) -> Any:
    return completions, spare, answer


def weighted(weight: float, completions: Any, prompts: Any) -> Any:
    return weight, completions, prompts


def keywords(*, prompts: Any, completions: Any) -> Any:
    return completions, prompts


REST = {"messages", "columns", "metadata", "answer", "ground_truth"}


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda prompts, replies: (prompts, replies), (P, R)),
        (lambda replies, prompts: (prompts, replies), (P, R)),
        (lambda completions, prompts: (prompts, completions), (P, R)),
        (lambda responses, answer: (responses, answer), (R, A)),
        (lambda replies: replies, R),
        (lambda answer, completions: (answer, completions), (A, R)),
        (with_truth, (R, A, {"prompts", *REST} - {"ground_truth"})),
        (trl, (R, P, REST)),
        (keywords, (R, P)),
        (positional_only, (R, P)),
        (with_default, (R, 7, A)),
        (functools.partial(weighted, 2.0), (2.0, R, P)),
        (functools.partial(weighted, weight=2.0), (2.0, R, P)),
        (Scorer(), (R, P)),
        (Scorer().method, (R, A)),
        (Scorer.of_class, R),
        (Scorer.static, (R, P)),
        (decorated(keywords), (R, P)),
        (functools.lru_cache(keywords), (R, P)),
        (lambda *both: both, (P, R)),
        (lambda *both, answer: (both, answer), ((P, R), A)),
        (lambda *both, **rest: (both, set(rest)), ((P, R), REST)),
        (lambda **rest: set(rest), {"prompts", "replies", "completions", "responses", *REST}),
        (lambda messages, replies, metadata: (messages, replies, metadata), (BATCH.messages, R, {"step": 3})),
        (lambda columns, replies: (sorted(columns), replies), (["answer", "ground_truth"], R)),
        (lambda replies, missing=5: (replies, missing), (R, 5)),
    ],
)  # fmt: skip
def test_by_name(function: Callable[..., Any], found: Any) -> None:
    positional, named = Arguments(function, "f").of(BATCH)
    if isinstance(function, functools._lru_cache_wrapper):
        function = function.__wrapped__  # lists are not hashable
    assert function(*positional, **named) == found


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: 0,
        lambda a, b, /: 0,
        lambda prompts: 0,
        lambda prompts, answer: 0,
        lambda prompt, completion: 0,
        lambda: 0,
        lambda x, *rest: 0,
        len,
        max,
        int,
        Scorer,
        lambda prompts, replies, anser: 0,
        lambda completions, prompt: 0,
        lambda x, replies: 0,
        lambda x, replies, /: 0,
        lambda replies, *args, solution, **kwargs: 0,
        functools.partial(weighted),
    ],
)
def test_unknown_arguments_are_refused(function: Callable[..., Any], message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        Arguments(function, "ppo.rewards.0").check(list(BATCH.columns))


def test_a_gold_score_has_no_columns() -> None:
    with pytest.raises(ValueError, match="takes 'answer', which is not a column of the dataset: there are none"):
        Arguments(lambda replies, answer: 0, "gold", FIELDS).check(())


def test_each_call_gets_copies() -> None:
    def edits(prompts: Any, completions: Any, messages: Any, columns: Any, metadata: Any, answer: Any) -> None:
        prompts.clear()
        completions[0] = "x"
        messages[0][0]["content"] = "x"
        columns["answer"][0] = "x"
        columns["more"] = []
        metadata["step"] = 9
        answer.clear()

    arguments = Arguments(edits, "f")
    before = repr(BATCH)
    for _ in range(2):
        positional, named = arguments.of(BATCH)
        assert (named["prompts"], named["answer"], named["columns"]["answer"]) == (P, A, A)
        edits(*positional, **named)
    assert repr(BATCH) == before
