"""Tasks that were submitted to Ray: one thread follows them, and whoever wants a result waits for it here."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from prefect.client.schemas.objects import State

from xray.tasks.prefect_state import crash_lost_task_run
from xray_runtime.errors import StageInterruptedError

POLL_SECONDS = 0.2


class ParentFailedError(RuntimeError):
    """A task did not run since one it takes from failed."""


@dataclass(frozen=True)
class SubmittedTask:
    """A task on its way."""

    name: str
    number: int
    """How many were submitted before it."""
    future: Any
    """Prefect's; its `wrapped_future` is Ray's reference."""
    parents: Sequence[str]
    submitted: float


class SubmittedTasks:
    """Tasks by name.

    Args:
        on_result: called in the following thread with a task, what it returned, and its seconds since it could begin;
            returns what `result` gives. What it raises counts as the task's failure.
        on_poll: called in that thread now and then.
    """

    def __init__(self, on_result: Callable[[SubmittedTask, Any, float], Any], on_poll: Callable[[], None]) -> None:
        self._on_result, self._on_poll = on_result, on_poll
        self._tasks: dict[str, SubmittedTask] = {}
        self._results: dict[str, Any] = {}
        self._failures: dict[str, BaseException] = {}
        self._ends: dict[str, float] = {}
        self._changed = threading.Condition()
        """Notified when a task ended."""

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def add(self, name: str, future: Any, parents: Sequence[str]) -> None:
        """Follow a task that takes from `parents`."""
        with self._changed:
            self._tasks[name] = SubmittedTask(name, len(self._tasks), future, parents, time.perf_counter())

    def future(self, name: str) -> Any:
        """Prefect's future of a task: as a parameter of another it becomes an edge."""
        return self._tasks[name].future

    def has_ended(self, name: str) -> bool:
        """Whether a task is done, or has failed."""
        return name in self._results or name in self._failures

    def all_ended(self) -> bool:
        """Whether no task is at work."""
        return len(self._results) + len(self._failures) == len(self._tasks)

    def result(self, name: str) -> Any:
        """Wait for a task. Raises the first failure where it has none."""
        with self._changed:
            while name not in self._results:
                if name in self._failures:
                    raise self.first_failure()
                # With a limit: a wait without one cannot be interrupted.
                self._changed.wait(POLL_SECONDS)
        return self._results[name]

    def finished(self, name: str) -> Any | None:
        """The result of a task that is done; None of any other."""
        return self._results.get(name)

    def wait(self, seconds: float | None = None) -> None:
        """Until every task has ended, `seconds` at most."""
        deadline = time.monotonic() + seconds if seconds is not None else None
        with self._changed:
            while not self.all_ended() and (deadline is None or time.monotonic() < deadline):
                self._changed.wait(POLL_SECONDS)

    def raise_failure(self) -> None:
        """Raises the first failure, where there is one."""
        if self._failures:
            raise self.first_failure()

    def has_failed_with(self, error: BaseException | None) -> bool:
        """Whether a task failed with this very error."""
        return any(failure is error for failure in self._failures.values())

    def first_failure(self) -> BaseException:
        """What failed by itself, not for want of a parent."""
        own = [error for error in self._failures.values() if not isinstance(error, ParentFailedError)]
        return (own or list(self._failures.values()))[0]

    def cancel_waiting(self) -> None:
        """Give up tasks that wait for others: what has not begun does not begin."""
        with self._changed:
            waiting = [t for t in self._tasks.values() if any(parent not in self._results for parent in t.parents)]
            self._give_up([task for task in waiting if not self.has_ended(task.name) and task.parents])

    def _give_up(self, tasks: Sequence[SubmittedTask]) -> None:
        for task in tasks:
            self._failures[task.name] = ParentFailedError(
                f"{task.name}: not started, because a stage it depends on failed"
            )
            ray.cancel(task.future.wrapped_future)
        self._changed.notify_all()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow the tasks while the context lasts."""
        ended = threading.Event()
        # With this thread's context: Prefect's settings are in it.
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._follow, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _follow(self, ended: threading.Event) -> None:
        waiting: dict[Any, str] = {}
        known = 0
        while True:
            last = ended.is_set()
            with self._changed:
                names = list(self._tasks)[known:]
            for name in names:
                # Ray's own waiting turns a signal that interrupts it into a SystemError.
                waiting[self._tasks[name].future.wrapped_future.future()] = name
            known += len(names)
            for done in concurrent.futures.wait(waiting, timeout=0).done:
                name = waiting.pop(done)
                if not self.has_ended(name):
                    self._take(self._tasks[name])
            if last:
                return
            self._on_poll()
            ended.wait(POLL_SECONDS)

    def _take(self, task: SubmittedTask) -> None:
        """Take the end of a task."""
        result, failure = None, None
        try:
            task.future.wait()
            state: State[Any] = task.future.state
            if state.is_crashed():
                crash_lost_task_run(task.future.task_run_id)
            if not state.is_completed():
                raise _error_of(state)
            ends = [self._ends[parent] for parent in task.parents if parent in self._ends]
            seconds = time.perf_counter() - max([task.submitted, *ends])
            result = self._on_result(task, state.result(), seconds)
        except BaseException as error:
            failure = error
        with self._changed:
            self._ends[task.name] = time.perf_counter()
            if failure is None:
                self._results[task.name] = result
            else:
                self._failures[task.name] = failure
                # Each would start a process, to find that it has nothing to take from.
                self._give_up(self._descendants(task.name))
            self._changed.notify_all()

    def _descendants(self, name: str) -> list[SubmittedTask]:
        """The tasks that take from `name`, or from one that does, in order."""
        names, found = {name}, []
        for task in self._tasks.values():
            if names & set(task.parents) and not self.has_ended(task.name):
                names.add(task.name)
                found.append(task)
        return found


def _error_of(state: State[Any]) -> BaseException:
    if state.is_pending():
        return ParentFailedError(state.message)
    if state.is_cancelled():
        return StageInterruptedError(state.message)
    error = state.result(raise_on_failure=False)
    return error if isinstance(error, BaseException) else RuntimeError(state.message)
