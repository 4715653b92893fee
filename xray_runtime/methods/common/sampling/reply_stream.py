"""Replies that are sampled while others begin and end: whoever needs one asks at any time, and weights may change
before it is complete.

A reply is sampled in parts of `part_tokens` tokens. Each part is a request of its own: the prompt with the tokens so
far, a seed that derives from the reply's and the part's number, and the weights that the generator then holds. All
replies under way share a batch; one that ends makes room for another after that part. So a change of weights waits for
a part, not for a reply, and each token's version is known.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple, cast

import numpy as np

from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.seeding import derive_seed

NUM_PARTS, MIN_PART_TOKENS = 16, 16
"""A reply has about this many parts, each of at least so many tokens."""
WINDOW_S = 0.005
"""Wait for more requests before the first part of an idle generator."""
MAX_BATCH = 512

Generate = Callable[[PromptBatch, Sampling, int], ReplyBatch]
"""(prompts and seeds, sampling, policy version) → replies, as `Generation.generate`."""
Runs = list[list[int]]
"""[version, number of tokens] of each stretch of a reply that one version of the policy sampled."""


class Sampled(NamedTuple):
    """One reply."""

    ids: list[int]
    logprobs: list[float]
    ended: bool
    versions: Runs

    def version(self, default: int = 0) -> int:
        """The oldest version that sampled a token."""
        return oldest(self.versions, default)


def oldest(versions: Runs, default: int) -> int:
    return min((version for version, _ in versions), default=default)


def by_token(versions: Runs) -> list[int]:
    """The version of each token."""
    return [version for version, count in versions for _ in range(count)]


def runs(versions: Iterable[int]) -> Runs:
    """The inverse of `by_token`."""
    return [[version, len(list(same))] for version, same in groupby(versions)]


def part_tokens(sampling: Sampling) -> int:
    """Tokens of a part: a divisor of `max_new_tokens`, so that all parts of all replies fit into one batch.

    A text of `stop` may lie across two parts, and routes are of a whole reply: such replies have one part.
    """
    most = sampling.max_new_tokens
    if sampling.stop or sampling.routes:
        return most
    least = max(MIN_PART_TOKENS, math.ceil(most / NUM_PARTS))
    return next((size for size in range(least, most) if most % size == 0), most)


def in_parts(sampling: Sampling) -> Sampling:
    """How a part is sampled."""
    return replace(sampling, max_new_tokens=part_tokens(sampling))


def part_seed(seed: int, part: int) -> int:
    return derive_seed(seed, "part", part) if part else seed


@dataclass(eq=False)
class _Waiting:
    prompt: list[int]
    seed: int
    sampling: Sampling
    version: int | None
    tag: Any
    answer: Future[Sampled]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The version of each token so far."""
    part: int = 0

    @property
    def next(self) -> Sampling:
        """How its next part is sampled. With a named version there is nothing to wait for, so it is whole."""
        return self.sampling if self.version is not None else in_parts(self.sampling)

    def begin_anew(self) -> None:
        self.ids, self.logprobs, self.versions, self.part = [], [], [], 0


class ReplyStream:
    """Samples replies in a thread of its own, until `close`. Any thread may call its methods.

    Args:
        generate: samples a batch; called in that thread.
        on_ended: called in that thread with (tag, reply) of those that ended, before anyone gets them.

    Attributes:
        failure: the first error of the generator or of `on_ended`; every later request fails with it.
        version: the policy's, for requests that name none.
    """

    def __init__(
        self, generate: Generate, on_ended: Callable[[list[tuple[Any, Sampled]]], None] = lambda _: None
    ) -> None:
        self._generate, self._on_ended = generate, on_ended
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._is_running = self._is_held = self._is_closed = False
        self.failure: BaseException | None = None
        self.version, self._num_stale = 0, 0
        self._busy_s, self._began = 0.0, cast("float | None", None)
        self._measured = time.perf_counter(), 0.0
        """(now, `busy_s`) at the last `take_idle`."""
        self._thread = threading.Thread(target=self._run, name="reply stream", daemon=True)
        self._thread.start()

    def sample(
        self, prompt: list[int], seed: int, sampling: Sampling, version: int | None = None, tag: Any = None
    ) -> Future[Sampled]:
        """A reply, sampled whole by a version of the policy; None: in parts, each by the version then held. The future
        may be cancelled; it fails with `failure`."""
        waiting = _Waiting(prompt, seed, sampling, version, tag, Future())
        with self._changed:
            if self.failure is not None:
                waiting.answer.set_exception(self.failure)
            else:
                self._waiting.append(waiting)
                self._changed.notify_all()
        return waiting.answer

    @contextmanager
    def updating(self, version: int, oldest: int) -> Iterator[None]:
        """Hold requests while the generator's weights become those of `version`; the running part ends first. Replies
        with a token of a version before `oldest` begin anew. Raises `failure`."""
        with self._changed:
            self._is_held = True
            self._changed.wait_for(lambda: not self._is_running)
            try:
                if self.failure is not None:
                    raise self.failure
                self._changed.release()
                try:
                    yield
                finally:
                    self._changed.acquire()
                self.version = version
                for waiting in self._waiting:
                    if waiting.version is None and min(waiting.versions, default=oldest) < oldest:
                        waiting.begin_anew()
                        self._num_stale += 1
            finally:
                self._is_held = False
                self._changed.notify_all()

    def take_stale(self) -> int:
        """How many replies began anew since the last call."""
        found, self._num_stale = self._num_stale, 0
        return found

    @property
    def busy_s(self) -> float:
        """Seconds in which the generator had a batch."""
        began = self._began
        return self._busy_s + (0.0 if began is None else time.perf_counter() - began)

    def take_idle(self) -> float:
        """The share of the time since the last call in which the generator had no batch."""
        (begin, busy), self._measured = self._measured, (time.perf_counter(), self.busy_s)
        return 1 - (self._measured[1] - busy) / (self._measured[0] - begin)

    def close(self) -> None:
        """End after the running part; requests that wait fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._fail(RuntimeError("the stage ended before this reply"))

    def _run(self) -> None:
        while not self._is_closed:
            with self._changed:
                is_idle = not self._waiting
                self._changed.wait_for(lambda: self._is_closed or (self._waiting and not self._is_held))
            if is_idle:
                time.sleep(WINDOW_S)
            with self._changed:
                self._waiting = [each for each in self._waiting if not each.answer.cancelled()]
                if self._is_closed or self._is_held or not self._waiting:
                    continue
                batch, sampling, version = self._next()
                self._is_running = True
            try:
                self._sample(batch, sampling, version)
            except BaseException as error:
                self._fail(error, batch)
            with self._changed:
                self._is_running = False
                self._changed.notify_all()

    def _next(self) -> tuple[list[_Waiting], Sampling, int]:
        """Remove those that can be sampled together with the one that waits longest."""

        def kind(waiting: _Waiting) -> tuple[Sampling, int]:
            return waiting.next, self.version if waiting.version is None else waiting.version

        first = kind(self._waiting[0])
        batch = [waiting for waiting in self._waiting if kind(waiting) == first][:MAX_BATCH]
        chosen = set(map(id, batch))
        self._waiting = [waiting for waiting in self._waiting if id(waiting) not in chosen]
        return batch, *first

    def _sample(self, batch: list[_Waiting], sampling: Sampling, version: int) -> None:
        self._began = time.perf_counter()
        seeds = np.array([part_seed(waiting.seed, waiting.part) for waiting in batch])
        rows = PromptBatch(input_ids=Ragged.of([*waiting.prompt, *waiting.ids] for waiting in batch), seed=seeds)
        replies = self._generate(rows, sampling, version)
        self._busy_s, self._began = self.busy_s, None
        done: list[tuple[_Waiting, Sampled]] = []
        others: list[_Waiting] = []
        columns = zip(replies.response_ids, replies.rollout_logprobs, replies.ended, strict=True)
        for waiting, (ids, logprobs, ended) in zip(batch, columns, strict=True):
            waiting.ids += ids.tolist()
            waiting.logprobs += logprobs.tolist()
            waiting.versions += [version] * len(ids)
            waiting.part += 1
            if ended or len(waiting.ids) >= waiting.sampling.max_new_tokens:
                done.append((waiting, Sampled(waiting.ids, waiting.logprobs, bool(ended), runs(waiting.versions))))
            else:
                others.append(waiting)
        with self._changed:
            self._waiting = others + self._waiting
        self._on_ended([(waiting.tag, sampled) for waiting, sampled in done if not waiting.answer.cancelled()])
        for waiting, sampled in done:
            if waiting.answer.set_running_or_notify_cancel():
                waiting.answer.set_result(sampled)

    def _fail(self, error: BaseException, batch: Iterable[_Waiting] = ()) -> None:
        with self._changed:
            self.failure = self.failure or error
            failed, self._waiting = {id(each): each for each in (*batch, *self._waiting)}, []
        for waiting in failed.values():
            if not waiting.answer.done() and waiting.answer.set_running_or_notify_cancel():
                waiting.answer.set_exception(self.failure)
