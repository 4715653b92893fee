"""Functions as sources: what they are given, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.message_texts import Messages
from xray_runtime.rewards import event_loop
from xray_runtime.rewards.kinds.function import FunctionSource
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
    "function",
    [
        lambda prompts, replies: [1.0],
        lambda prompts, replies: 3.0,
        lambda prompts, replies: None,
        lambda prompts, replies: {0: 1.0, 1: 2.0},
        lambda prompts, replies: {1.0, 2.0},
        lambda prompts, replies: "12",
        lambda prompts, replies: b"12",
        lambda prompts, replies: np.ones((2, 1)),
        lambda prompts, replies: torch.ones(()),
        lambda prompts, replies: [[1.0], [2.0]],
        lambda prompts, replies: [np.ones(1), 2.0],
        lambda prompts, replies: [{"score": 1.0}, 2.0],
        lambda prompts, replies: itertools.repeat(1.0),
        lambda prompts, replies: (1.0 for _ in prompts[1:]),
        lambda prompts, replies: ["a", "b"],
        lambda prompts, replies, anser: [],
        lambda prompts: [],
    ],
)
def test_a_function_that_is_none_of_scores_is_an_error(function: Callable[..., Any], message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        ask(function)


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
    assert seen == {"replies": list(THOUGHT.replies), "reasoning": ["7, no: 2", None, "7"], "answers": ["2", "5", ""]}


@pytest.mark.parametrize("name", ["reasoning", "answers"])
def test_a_name_that_is_a_column_too_is_refused(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def f(prompts, replies, {name}): return [1.0] * len(replies)", space)
    batch = Batch(["a"], ["b"], [[]], {name: ["c"]})
    with pytest.raises(ValueError, match=f"takes '{name}', which is a column of the dataset and a field"):
        FunctionSource(space["f"], "f", 5.0, 0).score(batch)

    def all_columns(prompts: list[str], replies: list[str], **columns: Any) -> list[float]:
        return [float(columns[name] == ["c"])]

    assert FunctionSource(all_columns, "f", 5.0, 0).score(batch) == [Score(1.0)]


GLOBAL_LIMIT = asyncio.Semaphore(1)
CLIENT: list[asyncio.Future[float]] = []


def test_objects_of_an_event_loop_work_in_every_call() -> None:
    """A semaphore binds to the loop in which someone waits for it; a client to the one in which it was opened."""

    async def one(reply: str) -> float:
        async with GLOBAL_LIMIT:
            await asyncio.sleep(0.001)
        if not CLIENT:
            CLIENT.append(asyncio.get_running_loop().create_future())
            CLIENT[0].set_result(1.0)
        return float(reply) * await asyncio.shield(CLIENT[0])

    async def limited(replies: list[str]) -> list[float]:
        return list(await asyncio.gather(*map(one, replies)))

    sources = [FunctionSource(limited, name, 5.0, 0) for name in ("f", "g")]
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda source: source.score(BATCH), sources))
        assert [[score.value for score in scores] for scores in found] == [[2.0, 5.0]] * 2


def test_late_calls_are_cancelled_and_have_no_score() -> None:
    cancelled = threading.Event()

    async def hangs(replies: list[str]) -> list[float]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [0.0] * len(replies)

    found = ask(hangs, timeout_s=0.1)
    assert all(math.isnan(score.value) for score in found)
    assert cancelled.wait(5.0)

    async def partly(replies: list[str]) -> list[Any]:
        late, done = asyncio.wait_for(asyncio.sleep(60), 0.01), asyncio.sleep(0, 1.0)
        return list(await asyncio.gather(late, done, return_exceptions=True))

    first, second = ask(partly)
    assert math.isnan(first.value)
    assert second.value == 1.0
    # A call that cancels itself has no score either.
    assert math.isnan(ask(lambda replies: (_ for _ in ()).throw(asyncio.CancelledError))[0].value)


def test_a_function_that_blocks_the_loop_costs_its_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "GRACE_S", 0.1)
    release = threading.Event()

    async def blocks(replies: list[str]) -> list[float]:
        release.wait()
        return [1.0] * len(replies)

    async def works(replies: list[str]) -> list[float]:
        return [1.0] * len(replies)

    assert all(math.isnan(score.value) for score in ask(blocks, timeout_s=0.1))
    assert [score.value for score in ask(works)] == [1.0, 1.0]
    release.set()


def test_a_functions_changes_reach_no_other_call() -> None:
    seen: list[Any] = []

    def edits(replies: list[str], messages: Any, columns: Any, answer: list[Any]) -> list[float]:
        seen.append([messages[0][0]["content"], answer[0], list(columns["level"]), list(replies)])
        messages[0][0]["content"] = answer[0] = replies[0] = "changed"
        columns["level"].clear()
        if len(seen) == 1:
            raise ConnectionError("away")
        return [1.0] * len(replies)

    assert values(edits, retries=1) == [1.0, 1.0]
    assert ask(edits)[0].value == 1.0
    assert seen == [["1 + 1", "2", [1, 2], ["2", "5"]]] * 3
