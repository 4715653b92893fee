"""Functions as sources: what they are given, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import math
import threading
import time
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
    found = ask(flaky, retries=1)
    assert [score.why for score in found] == ["ConnectionError: away"] * 2
    assert len(calls) == 2
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

    start = time.monotonic()
    for function in (hangs, hangs_too):
        found = ask(function, timeout_s=0.05, retries=1)
        assert [score.why for score in found] == ["TimeoutError: no answer within timeout_s = 0.05"] * 2
    assert time.monotonic() - start < 5.0
    release.set()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts, replies: [1.0], "must return one number a reply; for 2 replies it returned 1"),
        (lambda prompts, replies: 3.0, "must return a list of numbers ('float' object is not iterable)"),
        (lambda prompts, replies: ["a", "b"], "must return a list of numbers; 'a' is in it"),
        (lambda prompts, replies, anser: [], "takes 'anser', which is not a column of the dataset: add it to"),
        (lambda prompts: [], "must take the arguments prompts and replies, in this order"),
    ],
)
def test_a_function_that_is_none_of_scores_is_an_error(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^ppo\.rewards\.0\.function 'm:f': ") as caught:
        ask(function)
    assert message in str(caught.value)
