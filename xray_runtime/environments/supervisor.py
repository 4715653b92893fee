"""The supervisor of a worker process: requests with time limits, restarts, and replay of episodes.

All state belongs to one thread, which waits for the process, the clock and the pool's calls. After a restart an episode
is replayed at its next request: its reset and steps are sent again, and their answers dropped.

Faults:
    An answer is late, but the process answers a ping: the late episode fails.
    The process died, or user code blocks its ping: one of the episodes in flight may be at fault. Their requests are
    repeated. If it happens again, each is repeated alone and fails if it happens then; an episode that was alone both
    times fails at once.
    The process does not start: no episode is at fault, and requests do not fail with EnvironmentFailure.
"""

from __future__ import annotations

import itertools
import logging
import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from xray_runtime.cores import load
from xray_runtime.environments import worker
from xray_runtime.environments.calls import CallQueue
from xray_runtime.environments.episodes import Episode, Sent, fail, failure
from xray_runtime.environments.process import WorkerProcess

log = logging.getLogger(__name__)

START_S = 120.0
"""Time for the imports of an environment; longer on a busy machine."""
PONG_S = 1.0
SHUT_DOWN = "the pool was shut down"


class Supervisor:
    """Episodes of one worker. Any thread may call its methods.

    Args:
        environment: "module:name".
        timeout_s: limit of one reset or step, from the call of user code on.
        memory_mb: address space of the process.
        log_path: file for its output; None: discard it.
    """

    def __init__(self, environment: str, timeout_s: float, memory_mb: int, log_path: Path | None) -> None:
        self._environment, self._timeout_s = environment, timeout_s
        self._memory_mb, self._log_path = memory_mb, log_path
        self.ready: Future[None] = Future()
        """Done after the first start; RuntimeError if that fails."""
        self._calls = CallQueue()
        self._selector = selectors.DefaultSelector()
        self._process: WorkerProcess | None = None
        self._is_ready, self._started_at = False, 0.0
        self._pinged_at: float | None = None
        self._stop_at: float | None = None
        self._episodes: dict[int, Episode] = {}
        self._suspects: deque[Episode] = deque()
        self._sent: dict[int, Sent] = {}
        self._ids, self._keys = itertools.count(), itertools.count()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"environment {environment}")
        self._thread.start()

    def ask(self, number: int, request: dict[str, Any]) -> Future[dict[str, Any]]:
        """The answer to a reset or a step of an episode; fails as in `EnvironmentPool`."""
        future: Future[dict[str, Any]] = Future()
        if not self._calls.put(lambda: self._ask(number, request, future)):
            fail(future, RuntimeError(SHUT_DOWN))
        return future

    def close(self, number: int) -> None:
        """Close an episode, if there is one; its request fails."""
        self._calls.put(lambda: self._fail(number, "it was closed"))

    def stop(self, wait_s: float) -> None:
        """End the process, after at most `wait_s` for closing episodes."""

        def stop() -> None:
            self._stop_at = time.monotonic() + wait_s
            for number in list(self._episodes):
                self._close(number, RuntimeError(SHUT_DOWN))

        self._calls.put(stop)

    def join(self) -> None:
        """Wait until the process has ended."""
        self._thread.join()

    def _run(self) -> None:
        self._selector.register(self._calls.waiting, selectors.EVENT_READ, self._calls.run)
        cause = SHUT_DOWN
        try:
            self._start()
            while self._stop_at is None or (self._is_closing() and time.monotonic() < self._stop_at):
                for key, _ in self._selector.select(self._wait_s()):
                    key.data()
                end, act = self._limit()
                if time.monotonic() > end:
                    act()
                self._send_waiting()
        except BaseException as error:
            log.exception("the thread of an environment failed")
            cause = f"the thread of its worker failed: {error!r}"
        finally:
            self._finish(cause)

    def _finish(self, cause: str) -> None:
        if self._process is not None:
            self._end()
        self._selector.close()
        self._calls.close()
        for number in list(self._episodes):
            self._close(number, RuntimeError(cause))
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(cause))

    def _ask(self, number: int, request: dict[str, Any], future: Future[dict[str, Any]]) -> None:
        if self._stop_at is not None:
            fail(future, RuntimeError(SHUT_DOWN))
            return
        if request["op"] == "reset":
            self._fail(number, "it was reset before its answer came")
            self._episodes[number] = Episode(number, next(self._keys))
        episode = self._episodes.get(number)
        if episode is None:
            fail(future, failure(number, "it was not reset, was closed, or has failed"))
        elif episode.request is not None:
            fail(future, failure(number, "a step was requested before its last answer came"))
        else:
            episode.request, episode.future, episode.is_sent, episode.deaths = request, future, False, 0

    def _fail(self, number: int, cause: str) -> None:
        self._close(number, failure(number, cause))

    def _close(self, number: int, error: Exception) -> None:
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        if episode in self._suspects:
            self._suspects.remove(episode)
        if episode.future is not None:
            fail(episode.future, error)
        if episode.is_present and self._is_ready:
            self._send(episode, {"op": "close"})

    def _is_closing(self) -> bool:
        return any(sent.op == "close" for sent in self._sent.values())

    def _start(self) -> None:
        self._sent.clear()
        self._is_ready, self._pinged_at, self._started_at = False, None, time.monotonic()
        for episode in self._episodes.values():
            episode.is_sent = episode.is_present = False
        try:
            self._process = WorkerProcess(self._environment, self._memory_mb, self._log_path)
        except OSError as error:
            self._fail_start(f"OSError: {error}")
            return
        self._selector.register(self._process.stdout, selectors.EVENT_READ, self._read)
        self._selector.register(self._process.exited, selectors.EVENT_READ, self._take_death)

    def _end(self) -> int:
        process, self._process, self._is_ready = self._process, None, False
        assert process is not None
        for end in (process.stdin, process.stdout, process.exited):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        return process.end()

    def _fail_start(self, cause: str) -> None:
        if self._process is not None:
            self._end()
        line = f"the environment {self._environment!r} does not start: {cause}"
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(line))
        for episode in [episode for episode in self._episodes.values() if episode.request is not None]:
            self._close(episode.number, RuntimeError(line))

    def _send(self, episode: Episode, request: dict[str, Any], is_replay: bool = False) -> None:
        assert self._process is not None
        id = next(self._ids)
        self._sent[id] = Sent(episode, request["op"], is_replay, time.monotonic())
        self._process.write(request | {"id": id, "episode": episode.key})

    def _send_waiting(self) -> None:
        waiting = [episode for episode in self._episodes.values() if episode.request and not episode.is_sent]
        if waiting and self._process is None:
            self._start()
        if self._is_ready:
            if self._suspects:
                waiting = [] if self._sent else [self._suspects[0]]
            for episode in waiting:
                for request in () if episode.is_present else episode.history:
                    self._send(episode, request, is_replay=True)
                assert episode.request is not None
                self._send(episode, episode.request)
                episode.is_sent = episode.is_present = True
        self._watch_stdin()

    def _watch_stdin(self) -> None:
        if self._process is None:
            return
        watched = self._process.stdin in self._selector.get_map()
        if self._process.has_unsent and not watched:
            self._selector.register(self._process.stdin, selectors.EVENT_WRITE, self._process.flush)
        elif watched and not self._process.has_unsent:
            self._selector.unregister(self._process.stdin)

    def _read(self) -> None:
        process = self._process
        for message in [] if process is None else process.read():
            # An answer may end the process; its further messages are dropped.
            if process is self._process:
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        sent = self._sent.get(message.get("id", -1))
        if "ready" in message:
            self._is_ready = True
            if not self.ready.done():
                self.ready.set_result(None)
        elif "pong" in message:
            self._take_pong()
        elif not self._is_ready:
            self._fail_start(str(message.get("error")))
        elif sent is not None and "began" in message:
            sent.has_begun, sent.since = True, time.monotonic()
        elif sent is not None:
            del self._sent[message["id"]]
            self._take_answer(sent, message)

    def _take_answer(self, sent: Sent, message: dict[str, Any]) -> None:
        episode = sent.episode
        if sent.op == "close" or not self._is_here(episode):
            return
        if "error" in message:
            self._fail(episode.number, f"{'it cannot be replayed: ' * sent.is_replay}{message['error']}")
        elif not sent.is_replay:
            assert episode.request is not None
            assert episode.future is not None
            future, episode.future = episode.future, None
            episode.history.append(episode.request)
            episode.request = None
            if episode in self._suspects:
                self._suspects.remove(episode)
            if future.set_running_or_notify_cancel():
                future.set_result(message)

    def _overdue(self) -> list[Sent]:
        now = time.monotonic()
        return [sent for sent in self._sent.values() if now - sent.since > self._timeout_s]

    def _wait_s(self) -> float | None:
        end = min(self._limit()[0], math.inf if self._stop_at is None else self._stop_at)
        return None if end == math.inf else max(end - time.monotonic(), 0.0) + 0.001

    def _limit(self) -> tuple[float, Callable[[], None]]:
        """The next deadline of the process, and the action then."""
        if self._process is not None and not self._is_ready:
            limit = START_S * load()
            return self._started_at + limit, lambda: self._fail_start(f"it is not ready within {limit:.0f} s")
        if self._pinged_at is not None:
            return self._pinged_at + PONG_S * load(), self._miss_pong
        return min((sent.since for sent in self._sent.values()), default=math.inf) + self._timeout_s, self._ping

    def _ping(self) -> None:
        assert self._process is not None
        self._pinged_at = time.monotonic()
        self._process.write({"op": "ping", "id": -1})

    def _miss_pong(self) -> None:
        self._pinged_at = None
        if self._overdue():
            self._end()
            self._start_after_loss("answers no ping", f"took longer than {self._timeout_s:g} s")

    def _take_pong(self) -> None:
        self._pinged_at = None
        late = [sent.episode for sent in self._overdue() if sent.has_begun]
        for sent in self._overdue():
            sent.since = time.monotonic()  # for requests that wait for a thread
        if late:
            self._end()
            for episode in late:
                if self._is_here(episode):
                    self._fail(episode.number, f"took longer than {self._timeout_s:g} s")
            self._start()

    def _take_death(self) -> None:
        process = self._process
        self._read()
        if process is not self._process or process is None:
            return
        was_ready, code = self._is_ready, self._end()
        cause = f"exit code {code}"
        if code == worker.OUT_OF_MEMORY:
            cause += f", out of memory: memory_mb = {self._memory_mb}"
        if was_ready:
            self._start_after_loss(f"died, {cause}", f"its process died twice with it: {cause}")
        else:
            self._fail_start(f"its process ended while it started: {cause}")

    def _start_after_loss(self, what: str, cause: str) -> None:
        """Start the process again.

        Args:
            what: what happened to the process.
            cause: reason for the failure of an episode at fault.
        """
        # Episodes whose code may have been running; if none had begun, all with a request.
        begun = [sent.episode for sent in self._sent.values() if sent.has_begun]
        in_flight = dict.fromkeys(begun or [sent.episode for sent in self._sent.values()])
        log.warning("a process of %s %s, with %d episodes in flight", self._environment, what, len(in_flight))
        for episode in in_flight:
            episode.deaths += 1
            if not self._is_here(episode):
                continue
            if len(in_flight) == 1 and episode.deaths > 1:
                self._fail(episode.number, cause)
            elif episode.deaths > 1 and episode.request is not None and episode not in self._suspects:
                self._suspects.append(episode)
        self._start()

    def _is_here(self, episode: Episode) -> bool:
        return self._episodes.get(episode.number) is episode
