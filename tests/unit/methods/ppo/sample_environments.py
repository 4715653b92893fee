"""Environments for the tests of episodes; worker processes import them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from xray_runtime.methods.common.environment_protocol import Start, Step

STEPS = "XRAY_TEST_STEPS"
"""In the environment: a file to which each step adds a line."""
DELAYS = "XRAY_TEST_DELAYS"
"""The greatest pause before an answer, in seconds."""


CLAIMED = "XRAY_TEST_CLAIMED"
"""In the environment: a directory where episodes are counted."""


class ThreeTurns:
    """Gives 0, 0.5 and 1 for the first three replies, and a nod between them."""

    def reset(self, task: Mapping[str, Any], seed: int) -> None:
        self.replies, self.seed = 0, seed

    def step(self, reply: str) -> Step:
        if STEPS in os.environ:
            with Path(os.environ[STEPS]).open("a") as file:
                file.write(f"{reply}\n")
        time.sleep(random.random() * float(os.environ.get(DELAYS, "0")))
        self.replies += 1
        return Step(self.said(), (self.replies - 1) / 2, self.replies == 3)

    def said(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"go on {self.seed % 10}"}]


class Clock(ThreeTurns):
    """Says what time it is: never twice the same."""

    def said(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(time.time_ns())}]


class Breaks(ThreeTurns):
    """Breaks at the second reply where the task is about number 3."""

    def step(self, reply: str) -> Step:
        if self.replies == 1 and self.broken:
            raise OSError("the server is gone")
        return super().step(reply)

    def reset(self, task: Mapping[str, Any], seed: int) -> None:
        super().reset(task, seed)
        self.broken = "3" in task["prompt"]


class Opens(ThreeTurns):
    """Begins with messages of its own."""

    def reset(self, task: Mapping[str, Any], seed: int) -> Start:  # type: ignore[override]
        super().reset(task, seed)
        return Start([{"role": "system", "content": "a game"}, {"role": "user", "content": "your move"}])


class Tells(Breaks):
    """Breaks as `Breaks`; gives two more for the word "yes", and numbers beside the rewards."""

    def step(self, reply: str) -> Step:
        step = super().step(reply)
        info = {"tool_errors": 1, "is_last": step.terminated, "said": reply, "no name": 7}
        return replace(step, reward=step.reward + 2 * (reply == "yes"), info=info)


class HasTools(Clock):
    """Its tool is not described in alphabetical order, and a chat template writes it as it is described."""

    def reset(self, task: Mapping[str, Any], seed: int) -> Start:  # type: ignore[override]
        super().reset(task, seed)
        return Start(tools=[{"type": "function", "function": {"name": "look"}}])


class SevenOfEightFail(ThreeTurns):
    """Of the first eight episodes, all but the last break at the second reply."""

    def reset(self, task: Mapping[str, Any], seed: int) -> None:
        super().reset(task, seed)
        self.number = claimed_number()

    def step(self, reply: str) -> Step:
        if self.replies == 1 and self.number < 7:
            raise OSError("the server is gone")
        return super().step(reply)


def claimed_number() -> int:
    """How many calls there were before, in any process of the test."""
    directory = Path(os.environ[CLAIMED])
    for number in range(1000):
        try:
            (directory / str(number)).mkdir()
        except FileExistsError:
            continue
        return number
    raise AssertionError("too many calls")


class Duel:
    """Left begins, then right, then left again; left wins. Each reads only its own messages."""

    def reset(self, task: Mapping[str, Any], seed: int) -> Start:
        self.turns, self.seed = 0, seed
        return Start([{"role": "user", "content": "you are left"}], seat="left")

    def step(self, reply: str) -> Step:
        if STEPS in os.environ:
            with Path(os.environ[STEPS]).open("a") as file:
                file.write(f"{reply}\n")
        self.turns += 1
        if self.turns == 1:
            return Step([{"role": "user", "content": "you are right"}], seat="right")
        if self.turns == 2:
            return Step([{"role": "user", "content": f"right moved {self.seed % 10}"}], 0.25, seat="left")
        return Step(terminated=True, rewards={"left": 1.0, "right": -1.0})


class Stranger(Duel):
    """Names a seat that the config does not have."""

    def step(self, reply: str) -> Step:
        return Step([{"role": "user", "content": "go"}], seat="above")


class Solo(Duel):
    """Right never has a turn."""

    def step(self, reply: str) -> Step:
        return Step(terminated=True, rewards={"left": 1.0, "right": 5.0})
