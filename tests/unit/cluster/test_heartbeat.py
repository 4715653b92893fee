"""A heartbeat says where a thread is, and keeps nothing of what the thread works on."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from xray_runtime.cluster import heartbeat
from xray_runtime.cluster.heartbeat import HeartbeatSource


class Activation:
    """The output of a layer."""


class Forward(threading.Thread):
    """Passes of a model, each of which waits in its second layer until `allowed` has reached its number."""

    def __init__(self, passes: int = 1) -> None:
        super().__init__(daemon=True)
        self.passes, self.allowed, self.stands_in = passes, 0, 0
        self.made: list[weakref.ref[Activation]] = []

    def run(self) -> None:
        for number in range(1, self.passes + 1):
            self.layers(number)

    def layers(self, number: int) -> None:
        state = Activation()
        self.made.append(weakref.ref(state))
        self.second_layer(number)

    def second_layer(self, number: int) -> None:
        entering = Activation()
        self.made.append(weakref.ref(entering))
        self.stands_in = number
        while self.allowed < number:
            time.sleep(0.001)

    def stands(self, number: int) -> None:
        until(lambda: self.stands_in == number)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def source_of(work: Forward) -> Iterator[HeartbeatSource]:
    work.start()
    work.stands(1)
    source = HeartbeatSource()
    assert work.ident is not None
    source.work_thread = work.ident
    try:
        yield source
    finally:
        work.allowed = work.passes
        work.join(30)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("in_collective", [False, True])
def test_nothing_that_a_pass_made_outlives_it(
    in_collective: bool, no_collection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "COLLECTIVES", (__file__,) if in_collective else ())
    work = Forward()
    with source_of(work) as source:
        beats = [source.heartbeat() for _ in range(3)]
        alive = [made() is not None for made in work.made]
    assert alive == [True, True]
    assert [made() for made in work.made] == [None, None], "without a garbage collection"
    assert all(beat.doing.startswith(f"Forward.second_layer in {__file__}:") for beat in beats)
    assert [beat.waits_s > 0 for beat in beats] == [in_collective] * 3


def test_each_collective_begins_a_wait_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "COLLECTIVES", (__file__,))
    work = Forward(passes=20)
    with source_of(work) as source:
        for number in range(1, 21):
            began = time.monotonic()
            work.allowed = number - 1
            work.stands(number)
            first = source.heartbeat().waits_s
            assert first < time.monotonic() - began
            time.sleep(0.02)
            assert source.heartbeat().waits_s >= first + 0.02
    assert source.heartbeat().waits_s == 0.0
