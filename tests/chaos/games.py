"""Games of a few slow turns, for faults in mid-episode."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import httpx

import xray

TURNS = 4
PAUSE_S = 0.4
"""Delay before each answer."""


class Letters:
    """Answers with the number of letters so far, and rewards it: a lost or repeated turn changes the result."""

    def reset(self, task: Mapping[str, Any], seed: int) -> None:
        time.sleep(PAUSE_S)
        self.replies: list[str] = []

    def step(self, reply: str) -> xray.Step:
        time.sleep(PAUSE_S)
        self.replies.append(reply)
        letters = len("".join(self.replies))
        message = {"role": "user", "content": self.answer(letters)}
        return xray.Step([message], reward=letters / 10, terminated=len(self.replies) == TURNS)

    def answer(self, letters: int) -> str:
        return str(letters)


class Clock(Letters):
    """Answers with the time: only journaled answers give the same bytes again."""

    def answer(self, letters: int) -> str:
        return str(time.time_ns() % 10**9)


def spell(task: Mapping[str, Any]) -> float:
    """An agent with two slow calls; letters are its reward."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    letters = 0
    for _ in range(2):
        body = {"model": "policy", "messages": messages}
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=600)
        answer.raise_for_status()
        text = answer.json()["choices"][0]["message"]["content"]
        letters += len(text)
        time.sleep(PAUSE_S)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(letters)}]
    return letters / 10
