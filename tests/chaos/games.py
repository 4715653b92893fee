"""Games of a few slow turns, for lifecycles that are disturbed in mid-episode."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import xray

TURNS = 4
PAUSE_S = 0.4
"""Before each answer."""


class Letters:
    """Says how many letters have been said so far, and pays for them: a turn that is lost or said twice shows."""

    def reset(self, task: Mapping[str, Any], seed: int) -> None:
        time.sleep(PAUSE_S)
        self.replies: list[str] = []

    def step(self, reply: str) -> xray.Step:
        time.sleep(PAUSE_S)
        self.replies.append(reply)
        letters = len("".join(self.replies))
        message = {"role": "user", "content": self.said(letters)}
        return xray.Step([message], reward=letters / 10, terminated=len(self.replies) == TURNS)

    def said(self, letters: int) -> str:
        return str(letters)


class Clock(Letters):
    """Says what no other attempt would: only what was kept can give the same bytes again."""

    def said(self, letters: int) -> str:
        return str(time.time_ns() % 10**9)
