"""The environment of `benchmarks.episodes`: each answer takes 10 to 500 ms."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any

from xray_runtime.environments.protocol import Step

TURNS = 4
FASTEST_S, SLOWEST_S = 0.01, 0.5


class InThreads:
    """Its methods are ordinary ones, which block a thread."""

    def reset(self, task: Mapping[str, Any], seed: int) -> None:
        self._begin(seed)
        time.sleep(self._pause())

    def step(self, reply: str) -> Step:
        time.sleep(self._pause())
        return self._answer()

    def _begin(self, seed: int) -> None:
        self._random, self._turns = random.Random(seed), 0

    def _pause(self) -> float:
        return self._random.uniform(FASTEST_S, SLOWEST_S)

    def _answer(self) -> Step:
        self._turns += 1
        return Step([{"role": "user", "content": "go on"}], reward=1.0, terminated=self._turns == TURNS)


class OnLoop(InThreads):
    """Its methods are async, as those of one that waits for a service."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> None:  # type: ignore[override]
        self._begin(seed)
        await asyncio.sleep(self._pause())

    async def step(self, reply: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(self._pause())
        return self._answer()
