"""The supervisor of a worker process: requests with time limits, restarts, and replay of episodes.

All state belongs to the event loop of one thread, which waits for the process, the clock and the pool's calls. After a
restart an episode is replayed at its next request: its reset and steps are sent again, and their answers dropped.

Faults:
    An answer is late, but the process answers a ping: the late episode fails.
    The process died, or user code blocks its ping: one of the episodes in flight may be at fault. Their requests are
    repeated. If it happens again, each is repeated alone and fails if it happens then; an episode that was alone both
    times fails at once.
    The process does not start: no episode is at fault, and requests do not fail with EnvironmentFailure.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from xray_runtime.agents.environments import worker
from xray_runtime.agents.environments.episodes import EnvironmentFailure, PooledEpisode, Sent, fail
from xray_runtime.agents.environments.process import WorkerProcess
from xray_runtime.kernel.cores import load
from xray_runtime.methods.common.environment_protocol import Start, Step

log = logging.getLogger(__name__)

START_S = 120.0
"""Time for the imports of an environment; longer on a busy machine."""
PONG_S = 1.0
SHUT_DOWN = "the pool was shut down"


class Supervisor:
    """Episodes of one worker; the arguments are those of `EnvironmentPool`. Any thread may call its methods."""

    def __init__(self, environment: str, timeout_s: float, memory_mb: int, log_path: Path | None) -> None:
        self._environment, self._timeout_s = environment, timeout_s
        self._memory_mb, self._log_path = memory_mb, log_path
        self.ready: Future[None] = Future()
        """Done after the first start; RuntimeError if that fails."""
        self._loop = asyncio.new_event_loop()
        self._timer: asyncio.TimerHandle | None = None
        """For the next deadline."""
        self._lock, self._is_closed = threading.Lock(), False
        """`_lock`: guards `_is_closed`, after which the loop runs no more calls."""
        self._process: WorkerProcess | None = None
        self._is_ready, self._started_at = False, 0.0
        self._pinged_at: float | None = None
        self._stop_at: float | None = None
        self._episodes: dict[int, PooledEpisode] = {}
        self._cause = SHUT_DOWN
        """Why the thread ended."""
        self._suspects: dict[int, PooledEpisode] = {}
        self._sent: dict[int, Sent] = {}
        self._ids, self._keys = itertools.count(), itertools.count()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"environment {environment}")
        self._thread.start()

    def ask(self, number: int, request: dict[str, Any]) -> Future[Any]:
        """The Start or Step that answers a request; fails as in `EnvironmentPool`."""
        future: Future[Any] = Future()
        if not self._call(lambda: self._ask(number, request, future)):
            fail(future, RuntimeError(SHUT_DOWN))
        return future

    def close(self, number: int) -> None:
        """Close an episode, if there is one; its request fails."""
        self._call(lambda: self._fail(number, "it was closed"))

    def stop(self, wait_s: float) -> None:
        """End the process, after at most `wait_s` for closing episodes."""

        def stop() -> None:
            self._stop_at = time.monotonic() + wait_s
            for number in list(self._episodes):
                self._close(number, RuntimeError(SHUT_DOWN))

        self._call(stop)

    def join(self) -> None:
        self._thread.join()

    def _call(self, call: Callable[[], None]) -> bool:
        """Have the loop call `call`; returns False if it is closed."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._handle, call)
            return not self._is_closed

    def _run(self) -> None:
        self._loop.call_soon(self._handle, self._start)
        self._loop.run_forever()
        if self._process is not None:
            self._end()
        with self._lock:
            self._is_closed = True
        # Run the calls that came before.
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        self._loop.close()
        for number in list(self._episodes):
            self._close(number, RuntimeError(self._cause))
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(self._cause))

    def _handle(self, event: Callable[[], None]) -> None:
        """Handle an event: a call, a message, the end of the process, or a deadline."""
        try:
            event()
            if not self._is_closed:
                self._send_waiting()
                self._set_timer()
        except BaseException as error:
            log.exception("the thread of an environment failed")
            self._cause = f"the thread of its worker failed: {error!r}"
            self._loop.stop()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        end, act = self._limit()
        if self._stop_at is not None:
            is_closing = any(sent.op == "close" for sent in self._sent.values())
            if not is_closing or self._loop.time() >= self._stop_at:
                self._loop.stop()
            if self._stop_at < end:
                end, act = self._stop_at, lambda: None
        self._timer = self._loop.call_at(end, self._handle, act) if end < math.inf else None

    def _ask(self, number: int, request: dict[str, Any], future: Future[Any]) -> None:
        if self._stop_at is not None:
            fail(future, RuntimeError(SHUT_DOWN))
            return
        if request["op"] == "reset":
            self._fail(number, "it was reset before its answer came")
            self._episodes[number] = PooledEpisode(number, next(self._keys))
        episode = self._episodes.get(number)
        if episode is None:
            fail(future, EnvironmentFailure(f"episode {number}: it was not reset, was closed, or has failed"))
        elif episode.request is not None:
            fail(future, EnvironmentFailure(f"episode {number}: a step was requested before its last answer came"))
        else:
            episode.request, episode.future, episode.is_sent, episode.deaths = request, future, False, 0

    def _fail(self, number: int, cause: str) -> None:
        self._close(number, EnvironmentFailure(f"episode {number}: {cause}"))

    def _close(self, number: int, error: Exception) -> None:
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        self._suspects.pop(number, None)
        if episode.future is not None:
            fail(episode.future, error)
        if episode.is_present and self._is_ready:
            self._send(episode, {"op": "close"})

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
        self._loop.add_reader(self._process.stdout, self._handle, self._read)
        self._loop.add_reader(self._process.exited, self._handle, self._take_death)

    def _end(self) -> int:
        process, self._process, self._is_ready = self._process, None, False
        assert process is not None
        self._loop.remove_writer(process.stdin)
        self._loop.remove_reader(process.stdout)
        self._loop.remove_reader(process.exited)
        return process.end()

    def _fail_start(self, cause: str) -> None:
        if self._process is not None:
            self._end()
        line = f"the environment {self._environment!r} does not start: {cause}"
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(line))
        for episode in [episode for episode in self._episodes.values() if episode.request is not None]:
            self._close(episode.number, RuntimeError(line))

    def _send(self, episode: PooledEpisode, request: dict[str, Any], is_replay: bool = False) -> None:
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
                waiting = [] if self._sent else list(self._suspects.values())[:1]
            for episode in waiting:
                for request in () if episode.is_present else episode.history:
                    self._send(episode, request, is_replay=True)
                assert episode.request is not None
                self._send(episode, episode.request)
                episode.is_sent = episode.is_present = True
        if self._process is not None and self._process.unsent:
            self._loop.add_writer(self._process.stdin, self._handle, self._process.flush)
        elif self._process is not None:
            self._loop.remove_writer(self._process.stdin)

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
            request, future = episode.request, episode.future
            assert request is not None
            assert future is not None
            episode.request = episode.future = None
            episode.history.append(request)
            self._suspects.pop(episode.number, None)
            try:
                answer: Any = Start(**message["start"]) if request["op"] == "reset" else Step(**message["step"])
            except (KeyError, TypeError) as error:  # an environment could write anything to the pipe
                fail(future, error)
                return
            if future.set_running_or_notify_cancel():
                future.set_result(answer)

    def _overdue(self) -> list[Sent]:
        now = time.monotonic()
        return [sent for sent in self._sent.values() if now - sent.since > self._timeout_s]

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
        """Start the process again; `what` happened to it, and `cause` is why an episode at fault fails."""
        # Episodes whose code may have been running; if none had begun, all with a request.
        begun = [sent.episode for sent in self._sent.values() if sent.has_begun]
        in_flight = dict.fromkeys(begun or [sent.episode for sent in self._sent.values()])
        log.warning("a process of %s %s, with %d episodes in flight", self._environment, what, len(in_flight))
        for episode in in_flight:
            episode.deaths += 1
            if episode.deaths > 1 and self._is_here(episode):
                if len(in_flight) == 1:
                    self._fail(episode.number, cause)
                elif episode.request is not None:
                    self._suspects[episode.number] = episode
        self._start()

    def _is_here(self, episode: PooledEpisode) -> bool:
        return self._episodes.get(episode.number) is episode
