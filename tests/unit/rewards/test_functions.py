"""Functions as sources: what they are given, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from xray_runtime.rewards.functions import FunctionSource
from xray_runtime.rewards.source import Batch, Score

BATCH = Batch(
    prompts=["1 + 1", "2 + 2"],
    replies=["2", "5"],
    messages=[[{"role": "user", "content": "1 + 1"}], [{"role": "user", "content": "2 + 2"}]],
    columns={"answer": ["2", "4"], "level": [1, 2]},
    metadata={"stage": "ppo", "step": 3},
)


def ask(function: Callable[..., Any], timeout_s: float = 5.0, retries: int = 0) -> list[Score]:
    return FunctionSource(function, "ppo.rewards.0.function 'm:f'", timeout_s, retries).score(BATCH)


def values(function: Callable[..., Any], **limits: Any) -> list[float]:
    return [score.value for score in ask(function, **limits)]


def test_a_function_is_given_what_it_takes() -> None:
    seen: dict[str, Any] = {}

    def plain(prompts: list[str], replies: list[str]) -> list[int]:
        return [len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True)]

    def by_name(prompts: list[str], replies: list[str], answer: list[str], *, messages: Any, metadata: Any) -> Any:
        seen.update(messages=messages, metadata=metadata)
        return [float(reply == right) for reply, right in zip(replies, answer, strict=True)]

    def everything(*both: list[str], **rest: Any) -> np.ndarray:
        seen.update(rest)
        return np.arange(2.0)

    async def late(prompts: list[str], replies: list[str], columns: dict[str, list[Any]]) -> torch.Tensor:
        await asyncio.sleep(0.001)
        return torch.tensor(columns["level"])

    def answers_later(prompts: list[str], replies: list[str], missing: Any = None) -> Any:
        return late(prompts, replies, {"level": [7, 8]})

    assert values(plain) == [6.0, 6.0]
    assert values(by_name) == [1.0, 0.0]
    assert seen == {"messages": BATCH.messages, "metadata": {"stage": "ppo", "step": 3}}
    assert values(everything) == [0.0, 1.0]
    assert set(seen) == {"messages", "metadata", "columns", "answer", "level"}
    assert values(late) == [1.0, 2.0]
    assert values(answers_later) == [7.0, 8.0]


def test_no_number_is_no_score() -> None:
    found = ask(lambda prompts, replies: [None, math.nan])
    assert [math.isnan(score.value) for score in found] == [True, True]
    assert [score.why for score in found] == ["it returned None", "it returned nan"]


def test_a_call_that_raises_is_made_again() -> None:
    calls: list[str] = []

    def flaky(prompts: list[str], replies: list[str]) -> list[float]:
        calls.append(threading.current_thread().name)
        if len(calls) < 3:
            raise ConnectionError("away")
        return [1.0, 2.0]

    assert values(flaky, retries=2) == [1.0, 2.0]
    calls.clear()

    def away(prompts: list[str], replies: list[str]) -> list[float]:
        calls.append("again")
        raise ConnectionError("away")

    found = ask(away, retries=1)
    assert [score.why for score in found] == ["ConnectionError: away"] * 2
    assert len(calls) == 4  # twice together, once each
    assert all(math.isnan(score.value) for score in found)
    # Also what would end a process.
    assert "SystemExit" in str(ask(lambda prompts, replies: exit(1))[0].why)


def test_a_call_that_hangs_has_failed() -> None:
    release = threading.Event()

    def hangs(prompts: list[str], replies: list[str]) -> list[float]:
        release.wait()
        return [1.0, 1.0]

    async def hangs_too(prompts: list[str], replies: list[str]) -> list[float]:
        await asyncio.sleep(60)
        return [1.0, 1.0]

    for function in (hangs, hangs_too):
        found = ask(function, timeout_s=0.05, retries=1)
        assert [score.why for score in found] == ["TimeoutError: no answer within timeout_s = 0.05"] * 2
    release.set()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts, replies: [1.0], "must return one number per reply; for 2 replies it returned 1"),
        (lambda prompts, replies: 3.0, "must return a list of numbers, one per reply, not 3.0"),
        (lambda prompts, replies: None, "must return a list of numbers, one per reply, not None"),
        (lambda prompts, replies: {0: 1.0, 1: 2.0}, "one per reply, not {0: 1.0, 1: 2.0}"),
        (lambda prompts, replies: {1.0, 2.0}, "one per reply, not {1.0, 2.0}"),
        (lambda prompts, replies: "12", "one per reply, not '12'"),
        (lambda prompts, replies: b"12", "one per reply, not b'12'"),
        (lambda prompts, replies: np.ones((2, 1)), "one per reply, not an array of 2 dimensions"),
        (lambda prompts, replies: torch.ones(()), "one per reply, not an array of 0 dimensions"),
        (lambda prompts, replies: [[1.0], [2.0]], "must return a list of numbers; [1.0] is in it"),
        (lambda prompts, replies: [np.ones(1), 2.0], "must return a list of numbers; array([1.]) is in it"),
        (lambda prompts, replies: [{"score": 1.0}, 2.0], "must return a list of numbers; {'score': 1.0} is in it"),
        (lambda prompts, replies: itertools.repeat(1.0), "for 2 replies it returned more than 2"),
        (lambda prompts, replies: (1.0 for _ in prompts[1:]), "for 2 replies it returned 1"),
        (lambda prompts, replies: ["a", "b"], "must return a list of numbers; 'a' is in it"),
        (
            lambda prompts, replies, anser: [],
            "takes 'anser', which is not a column of the dataset: there are answer, level; add it to",
        ),
        (lambda prompts: [], "must take the arguments prompts and replies, in this order"),
    ],
)
def test_a_function_that_is_none_of_scores_is_an_error(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^ppo\.rewards\.0\.function 'm:f': ") as caught:
        ask(function)
    assert message in str(caught.value)


def test_scores_of_many_kinds_count() -> None:
    for given in (
        (1, True),
        [np.float32(1.0), np.bool_(True)],
        [torch.tensor(1.0), 1.0],
        np.array([1, 1]),
        (1.0 for _ in range(2)),
    ):
        assert values(lambda prompts, replies, given=given: given) == [1.0, 1.0]


def batch(num_replies: int) -> Batch:
    texts = [str(number) for number in range(num_replies)]
    return Batch(texts, texts, [[]] * num_replies, {"answer": texts})


@pytest.mark.parametrize("bad", [[0], [63], [5, 6, 40], list(range(0, 64, 2)), list(range(64))])
def test_a_row_that_raises_costs_its_row(bad: list[int], caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def centred(prompts: list[str], replies: list[str], answer: list[str]) -> list[float]:
        assert prompts == replies == answer
        calls.append(len(replies))
        numbers = [int(reply) for reply in replies]
        for number in numbers:
            if number in bad:
                raise KeyError(number)
        return [number - sum(numbers) / len(numbers) for number in numbers]

    with caplog.at_level(logging.WARNING):
        found = FunctionSource(centred, "f", 5.0, 1).score(batch(64))
    lost = {row for row, score in enumerate(found) if math.isnan(score.value)}
    # Where every eighth of the rows has one, the function is at fault.
    everywhere = len(bad) >= 32
    assert lost == set(range(64) if everywhere else bad)
    assert all(found[row].why == f"KeyError: {bad[0] if everywhere else row}" for row in lost)
    good = [row for row in range(64) if row not in lost]
    # As if the others were not there.
    assert [found[row].value for row in good] == [row - sum(good) / len(good) for row in good]
    assert len(calls) <= 2 + 2 * 6 * len(bad) + 1
    assert not everywhere or len(calls) == 2 + 2 + 4 + 8
    [line] = caplog.records
    assert line.getMessage() == f"f: failed for {len(lost)} of 64 replies"


def test_a_generator_that_raises_costs_its_row() -> None:
    def lazily(prompts: list[str], replies: list[str]) -> Any:
        return (1 / int(reply) for reply in replies)

    found = FunctionSource(lazily, "f", 5.0, 0).score(batch(4))
    assert [score.value for score in found[1:]] == [1.0, 0.5, 1 / 3]
    assert found[0].why == "ZeroDivisionError: division by zero"


def test_a_row_that_hangs_is_not_looked_for() -> None:
    calls: list[int] = []

    async def hangs(prompts: list[str], replies: list[str]) -> list[float]:
        calls.append(len(replies))
        await asyncio.sleep(60 if "3" in replies else 0)
        return [1.0] * len(replies)

    found = FunctionSource(hangs, "f", 0.2, 1).score(batch(8))
    assert calls == [8, 8]
    assert {score.why for score in found} == {"TimeoutError: no answer within timeout_s = 0.2"}


@pytest.mark.parametrize(("fails", "lost"), [(1, 0), (2, 0), (3, 0), (99, 8)])
def test_a_function_that_works_again_while_rows_are_looked_for(fails: int, lost: int) -> None:
    calls: list[int] = []

    def flaky(prompts: list[str], replies: list[str]) -> list[float]:
        calls.append(len(replies))
        if len(calls) <= fails:
            raise ConnectionError("away")
        return [float(len(replies))] * len(replies)

    found = FunctionSource(flaky, "f", 5.0, 0).score(batch(8))
    assert [score.value for score in found if not math.isnan(score.value)] == [8.0] * (8 - lost)


THOUGHT = Batch(
    prompts=["1 + 1", "2 + 2", "3"],
    replies=["<think>\n7, no: 2\n</think>\n\n2", "5", "<think>\n7"],
    messages=[[{"role": "user", "content": "a"}]] * 3,
    columns={"answer": ["2", "4", "3"]},
)


def test_a_function_is_given_the_reasoning_apart_from_the_answers() -> None:
    seen: dict[str, Any] = {}

    def both(prompts: list[str], replies: list[str], *, reasoning: list[str | None], answers: list[str]) -> list[float]:
        seen.update(replies=replies, reasoning=reasoning, answers=answers)
        return [1.0] * len(replies)

    FunctionSource(both, "f", 5.0, 0).score(THOUGHT)
    assert seen == {
        "replies": list(THOUGHT.replies),
        "reasoning": ["7, no: 2", None, "7"],
        "answers": ["2", "5", ""],
    }


@pytest.mark.parametrize("name", ["reasoning", "answers"])
def test_a_name_that_is_a_column_too_is_refused(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def f(prompts, replies, {name}): return [1.0] * len(replies)", space)
    batch = Batch(["a"], ["b"], [[]], {name: ["c"]})
    with pytest.raises(ValueError, match=f"takes '{name}', which is a part of the replies and a column of the dataset"):
        FunctionSource(space["f"], "f", 5.0, 0).score(batch)

    def all_columns(prompts: list[str], replies: list[str], **columns: Any) -> list[float]:
        return [float(columns[name] == ["c"])]

    assert FunctionSource(all_columns, "f", 5.0, 0).score(batch) == [Score(1.0)]
