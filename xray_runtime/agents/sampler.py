"""Collects calls that arrive at about the same time into batches for the generator.

Each reply has its own seed, so it does not depend on the rest of its batch. Weights change between batches only
(`hold`, `release`), so one version of the policy samples all of a reply.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling

WINDOW_S = 0.005
"""Wait for more calls before a batch."""
MAX_BATCH = 512

Generate = Callable[[PromptBatch, Sampling, int], ReplyBatch]
"""(prompts and seeds, sampling, policy version) → replies, as `Generation.generate`; called in a thread."""


class GeneratorFailedError(RuntimeError):
    """The generator raised an error; nothing is wrong with the call."""


class Sampled(NamedTuple):
    """One reply."""

    ids: list[int]
    logprobs: list[float]
    ended: bool
    version: int
    """The version of the policy that sampled it."""


@dataclass(frozen=True)
class _Waiting:
    prompt: list[int]
    seed: int
    sampling: Sampling
    version: int | None
    answer: asyncio.Future[Sampled]


class BatchSampler:
    """Samples replies. All methods run on one event loop.

    Attributes:
        failure: the first error of the generator; every later call fails.
        version: the policy's, for calls that name none.
        busy_s: seconds in which the generator had a batch.
    """

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._waiting: list[_Waiting] = []
        self._running: asyncio.Task[None] | None = None
        self.failure: Exception | None = None
        self.version, self.busy_s = 0, 0.0
        # Fair: an update waits for the running batch only.
        self._weights = asyncio.Lock()

    async def sample(self, prompt: list[int], seed: int, sampling: Sampling, version: int | None) -> Sampled:
        """Sample a reply with a version of the policy; None: with `self.version`, once its turn comes.

        Raises:
            GeneratorFailedError: the generator failed.
        """
        waiting = _Waiting(prompt, seed, sampling, version, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await waiting.answer

    async def hold(self) -> None:
        """Wait for the running batch, and begin no other until `release`."""
        await self._weights.acquire()

    def release(self, version: int) -> None:
        """Go on; the generator now holds `version`."""
        self.version = version
        self._weights.release()

    async def _run(self) -> None:
        await asyncio.sleep(WINDOW_S)
        while self._waiting:
            async with self._weights:
                first = self._waiting[0]
                version = self._version(first)
                alike = first.sampling, version
                same = [w for w in self._waiting if (w.sampling, self._version(w)) == alike][:MAX_BATCH]
                chosen = set(map(id, same))
                self._waiting = [waiting for waiting in self._waiting if id(waiting) not in chosen]
                begin = time.perf_counter()
                await self._answer(same, version)
                self.busy_s += time.perf_counter() - begin
        self._running = None

    def _version(self, waiting: _Waiting) -> int:
        return self.version if waiting.version is None else waiting.version

    async def _answer(self, batch: list[_Waiting], version: int) -> None:
        try:
            if self.failure is not None:
                raise self.failure
            seeds = np.array([waiting.seed for waiting in batch])
            rows = PromptBatch(input_ids=Ragged.of(waiting.prompt for waiting in batch), seed=seeds)
            replies = await asyncio.to_thread(self._generate, rows, batch[0].sampling, version)
        except Exception as error:
            self.failure = error
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(GeneratorFailedError("the generator failed"))
            return
        columns = zip(replies.response_ids, replies.rollout_logprobs, replies.ended, strict=True)
        for waiting, (ids, logprobs, ended) in zip(batch, columns, strict=True):
            if not waiting.answer.done():  # its episode may have been closed
                waiting.answer.set_result(Sampled(ids.tolist(), logprobs.tolist(), bool(ended), version))
