"""Replies in parts: which version samples a token, what begins anew."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling
from xray_runtime.methods.common.sampling.reply_stream import (
    ReplyStream,
    by_token,
    part_tokens,
    runs,
)

END = 1
SAMPLING = Sampling(64, 1.0, (END,), 0)
PART = 16


class Generator:
    """Each token is a function of everything before it, the request's seed and the version. A reply to [n, …] ends
    with token n."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        """One for each batch that may be sampled."""
        self.batches: list[tuple[int, int, int]] = []
        """(rows, most tokens, version)"""
        self.error: Exception | None = None

    def __call__(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        assert self.turn.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        self.batches.append((len(rows), sampling.max_new_tokens, version))
        replies = [
            self.reply(ids.tolist(), seed, sampling.max_new_tokens, version)
            for ids, seed in zip(rows.input_ids, rows.seed.tolist(), strict=True)
        ]
        return ReplyBatch(
            response_ids=Ragged.of(replies),
            rollout_logprobs=Ragged.of(([-id / 128 - version for id in ids] for ids in replies), np.float32),
            ended=np.array([ids[-1] == END for ids in replies]),
        )

    @staticmethod
    def reply(prompt: list[int], seed: int, most: int, version: int) -> list[int]:
        draw, ids = random.Random(repr((prompt, seed, version))), list[int]()
        done = len(prompt) - 2
        while len(ids) < most and END not in ids:
            ids.append(END if done + len(ids) + 1 == prompt[0] else draw.randint(2, 99))
        return ids


@pytest.fixture
def generator() -> Generator:
    return Generator()


@pytest.fixture
def stream(generator: Generator) -> Iterator[ReplyStream]:
    with closing(ReplyStream(generator)) as opened:
        yield opened
        generator.turn.release(1000)


def let(generator: Generator, batches: int) -> None:
    """Let that many batches be sampled, and wait until they are."""
    before = len(generator.batches)
    generator.turn.release(batches)
    deadline = time.monotonic() + 20
    while len(generator.batches) < before + batches:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(("most", "size"), [(8, 8), (16, 16), (64, 16), (100, 20), (97, 97), (1024, 64), (1000, 100)])
def test_parts_divide_a_reply(most: int, size: int) -> None:
    assert part_tokens(Sampling(most, 1.0, (END,), 0)) == size


def test_texts_that_end_a_reply_and_routes_are_of_whole_replies() -> None:
    assert part_tokens(Sampling(64, 1.0, (END,), 0, stop=("x",))) == 64
    assert part_tokens(Sampling(64, 1.0, (END,), 0, routes=True)) == 64


def test_runs_and_tokens_are_inverse() -> None:
    assert runs([3, 3, 4, 3]) == [[3, 2], [4, 1], [3, 1]]
    assert by_token([[3, 2], [4, 1], [3, 1]]) == [3, 3, 4, 3]


def test_a_reply_goes_on_with_new_weights_and_short_ones_do_not_wait(generator: Generator, stream: ReplyStream) -> None:
    sampling = replace(SAMPLING, max_new_tokens=128)
    long = stream.sample([100, 0], 5, sampling)
    let(generator, 1)
    short = stream.sample([5, 0], 6, sampling)
    let(generator, 2)  # the first of them may have begun before
    assert short.result(20).versions == [[0, 5]]
    assert not long.done()
    generator.turn.release()  # the part that runs
    with stream.updating(7, 0):
        found = len(generator.batches)
        time.sleep(0.05)
        assert len(generator.batches) == found
    let(generator, 7 - found)
    reply = long.result(20)
    changed = PART * found
    assert reply.versions == [[0, changed], [7, 100 - changed]]
    assert reply.version() == 0
    assert reply.ended
    assert len(reply.ids) == 100
    assert all(0 <= -p - v < 1 for p, v in zip(reply.logprobs, by_token(reply.versions), strict=True))


def test_a_reply_with_too_old_a_token_begins_anew(generator: Generator, stream: ReplyStream) -> None:
    future = stream.sample([60, 0], 5, SAMPLING)
    let(generator, 1)
    for version in (1, 2):
        generator.turn.release()
        with stream.updating(version, version - 1):
            pass
    generator.turn.release(10)
    reply = future.result(20)
    assert reply.version() >= 1
    assert reply.ids[:PART] == Generator.reply([60, 0], 5, PART, reply.versions[0][0])
    assert stream.take_stale() == 1
    assert stream.take_stale() == 0


def test_a_named_version_samples_a_whole_reply(generator: Generator, stream: ReplyStream) -> None:
    future = stream.sample([60, 0], 5, SAMPLING, version=0)
    generator.turn.release()
    assert future.result(20).ids == Generator.reply([60, 0], 5, 64, 0)
    assert generator.batches == [(1, 64, 0)]


def test_a_failure_of_the_generator_reaches_all_that_wait_and_come(generator: Generator, stream: ReplyStream) -> None:
    error = generator.error = ValueError("the device is gone")
    waiting = [stream.sample([60, 0], seed, SAMPLING) for seed in range(3)]
    generator.turn.release()
    wait(waiting, 5)
    assert all(future.exception(0) is error for future in (*waiting, stream.sample([3, 0], 9, SAMPLING)))
    with pytest.raises(ValueError, match="the device is gone"), stream.updating(1, 0):
        pytest.fail("weights were changed")


def test_ended_replies_are_told_before_anyone_gets_them_and_cancelled_ones_are_not(generator: Generator) -> None:
    told: list[str] = []
    with closing(ReplyStream(generator, lambda ended: told.extend(tag for tag, _ in ended))) as stream:
        kept, dropped = (stream.sample([20, 0], seed, SAMPLING, tag=tag) for seed, tag in enumerate(("a", "b")))
        kept.add_done_callback(lambda _: told.append("done"))
        let(generator, 1)
        assert dropped.cancel()
        generator.turn.release(5)
        kept.result(20)
    assert told == ["a", "done"]


def test_what_waits_as_the_stream_closes_fails(generator: Generator) -> None:
    stream = ReplyStream(generator)
    future = stream.sample([60, 0], 5, SAMPLING)
    generator.turn.release(1)
    stream.close()
    with pytest.raises(RuntimeError, match="the stage ended"):
        future.result(5)
