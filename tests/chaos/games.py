"""Games of a few slow turns, for faults in mid-episode."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

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
