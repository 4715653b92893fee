"""Environments that workers import: well behaved ones, and one that does on request what none should."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xray_runtime.agents.environments.adapters import from_gymnasium, from_tools
from xray_runtime.methods.common.environment_protocol import Environment, Start, Step


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def calculator() -> Environment:
    """Worth 1 where the last reply says what was asked."""
    return from_tools([add], lambda task, reply: float(task["prompt"] in reply))()


async def add_later(a: int, b: int) -> int:
    """Add two numbers, after a while.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0.01)
    return a + b


def patient() -> Environment:
    """As `calculator`, with a tool that is async."""
    return from_tools([add_later], lambda task, reply: float(task["prompt"] in reply))()


def examined() -> Environment:
    """Worth 1 where the last reply is what a column says."""
    return from_tools([add], lambda task, reply: float(task["answer"] == reply))()


class Spelling:
    """Of Gymnasium's API: three words, paid by their letters."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self._words = 0
        return f"Word {(seed or 0) % 10}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._words += 1
        letters = sum(letter.isalpha() for letter in action)
        return f"{letters} letters", letters / 10, self._words == 3, False, {"letters": letters, "object": object()}


def spelling() -> Environment:
    return from_gymnasium(Spelling, lambda reply: reply.strip() or None)()


class Guess:
    """Guess the number; what it says depends on the seed and on how often it was asked."""

    def reset(self, task: Mapping[str, Any], seed: int) -> Start:
        self._number, self._count, self._task = random.Random(seed).randrange(100), 0, task
        return Start([{"role": "user", "content": task["prompt"]}])

    def step(self, reply: str) -> Step:
        self._count += 1
        guess = int(reply)
        if guess == self._number:
            return Step(reward=1.0 / self._count, terminated=True)
        side = "higher" if guess < self._number else "lower"
        return Step([{"role": "user", "content": f"{side} ({self._count})"}], truncated=self._count == 8)


class Sleeper:
    """Counts how many are inside at the same time."""

    inside = most = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> None:
        pass

    async def step(self, reply: str) -> Step:
        Sleeper.inside += 1
        Sleeper.most = max(Sleeper.most, Sleeper.inside)
        await asyncio.sleep(0.2)
        Sleeper.inside -= 1
        return Step(info={"most": Sleeper.most})


class Faulty:
    """Adds the numbers it is told; other words are faults. `task["log"]` names a file of what is done."""

    def reset(self, task: Mapping[str, Any], seed: int) -> None:
        self._sum, self._task = seed, task
        if task.get("fault"):
            self.step(task["fault"])

    def step(self, reply: str) -> Any:
        match reply.split():
            case ["raise"]:
                raise KeyError("no such\nroom")
            case ["half"]:
                raise ValueError("a lone surrogate: \ud800")
            case ["stop"]:
                next(iter(()))
            case ["leave"]:
                raise SystemExit(3)
            case ["hang"]:
                time.sleep(1000)
            case ["block"]:
                re.match(r"^(a+)+$", "a" * 60 + "b")  # holds the interpreter
            case ["slow"]:
                time.sleep(0.3)
            case ["flood"]:
                return Step([{"role": "user", "content": "x" * 70_000}])
            case ["info"]:
                return Step(info={"x": "x" * 70_000})
            case ["eat"]:
                kept = []
                while True:
                    kept.append(bytes(2**26))
            case ["fork", path]:
                if os.fork() == 0:
                    time.sleep(1000)
                child = subprocess.Popen(["sleep", "1000"])
                Path(path).write_text(str(child.pid))
                time.sleep(1000)
            case ["exit", code]:
                os._exit(int(code))
            case ["once", path]:
                if not Path(path).exists():
                    Path(path).touch()
                    os._exit(7)
            case ["print"]:
                print('{"id": 0, "step": {}}', flush=True)
                os.write(1, b"{}\n")
            case ["nonsense"]:
                return {"reward": 1.0}
            case [number]:
                self._sum += int(number)
        return Step([{"role": "user", "content": str(self._sum)}], reward=float(self._sum))

    def close(self) -> None:
        if "log" in self._task:
            Path(self._task["log"]).write_text(f"closed at {self._sum}")


class Blocking:
    """Async methods, one of which blocks the loop."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> None:
        self._sum = seed

    async def step(self, reply: str) -> Step:
        if reply == "block":
            time.sleep(1000)
        await asyncio.sleep(0.2)
        self._sum += int(reply)
        return Step(reward=float(self._sum))


class Half:
    def reset(self, task: Mapping[str, Any], seed: int) -> None: ...


def broken() -> Any:
    raise OSError("no display")
