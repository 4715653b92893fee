"""Tasks that were submitted to Ray; one thread follows them and records their results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from prefect.client.schemas.objects import State

from xray.tasks.prefect_run import crash_lost_task_run
from xray_runtime.kernel.errors import StageInterruptedError, first_line, root_cause

POLL_SECONDS = 0.2


class ParentFailedError(RuntimeError):
    """A task was not started, because one it depends on failed; `cause` is that failure."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, eq=False)
class SubmittedTask:
    name: str
    number: int
    """How many tasks were submitted before it."""
    future: Any
    """Prefect's future; its `wrapped_future` is Ray's reference."""
    parents: Sequence[str]
    submitted: float = field(default_factory=time.perf_counter)
    end: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    """Done when the task has ended and its result was recorded."""

    @property
    def is_completed(self) -> bool:
        """Whether it has ended with a result."""
        return self.end.done() and self.end.exception() is None


class SubmittedTasks:
    """Tasks by name.

    Args:
        on_result: called in the following thread with a task, its return value, and the seconds since it could begin;
            returns the value for `result`. An exception it raises is the task's failure.
        on_poll: called in that thread from time to time.
    """

    def __init__(self, on_result: Callable[[SubmittedTask, Any, float], Any], on_poll: Callable[[], None]) -> None:
        self._on_result, self._on_poll = on_result, on_poll
        self._tasks: dict[str, SubmittedTask] = {}
        self._failures: list[BaseException] = []
        """In order of time."""
        self._ends: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def add(self, name: str, future: Any, parents: Sequence[str]) -> None:
        """Follow a task that depends on `parents`."""
        self._tasks[name] = SubmittedTask(name, len(self._tasks), future, parents)

    def future(self, name: str) -> Any:
        """Prefect's future of a task: as a parameter of another task it becomes an edge."""
        return self._tasks[name].future

    def has_ended(self, name: str) -> bool:
        """Whether a task is completed or has failed."""
        return name in self._tasks and self._tasks[name].end.done()

    def all_ended(self) -> bool:
        return all(task.end.done() for task in list(self._tasks.values()))

    def result(self, name: str) -> Any:
        """Wait for a task. Raises its own failure if it has no result."""
        end = self._tasks[name].end
        # A wait without a limit cannot be interrupted.
        while not concurrent.futures.wait([end], POLL_SECONDS).done:
            pass
        return end.result()

    def finished(self, name: str) -> Any | None:
        """The result of a completed task, else None."""
        task = self._tasks.get(name)
        return task.end.result() if task is not None and task.is_completed else None

    def wait(self, seconds: float | None = None) -> None:
        """Wait until every task has ended, for at most `seconds`."""
        deadline = time.monotonic() + seconds if seconds is not None else None
        while not self.all_ended() and (deadline is None or time.monotonic() < deadline):
            concurrent.futures.wait([task.end for task in list(self._tasks.values())], POLL_SECONDS)

    def raise_failure(self) -> None:
        """Raise the first failure, if there is one."""
        if self._failures:
            raise self.first_failure()

    def has_failed_with(self, error: BaseException | None) -> bool:
        """Whether a task failed with this very error."""
        return any(failure is error for failure in self._failures)

    def first_failure(self) -> BaseException:
        """The first failure that another failure did not cause."""
        own = [error for error in self._failures if not isinstance(error, ParentFailedError)]
        return (own or self._failures)[0]

    def cancel_waiting(self) -> None:
        """Cancel tasks that still wait for others."""
        for task in list(self._tasks.values()):
            # A checkpoint that existed before the run is not a task.
            parents = [self._tasks[parent] for parent in task.parents if parent in self._tasks]
            if not all(parent.is_completed for parent in parents):
                self._cancel(task, StageInterruptedError(f"{task.name}: not started, because the run was stopped"))

    def _cancel(self, task: SubmittedTask, error: BaseException) -> None:
        if not task.end.done():
            self._fail(task, error)
            ray.cancel(task.future.wrapped_future)

    def _fail(self, task: SubmittedTask, error: BaseException) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._failures.append(error)
            task.end.set_exception(error)

    def _parent_failed(self, task: SubmittedTask) -> BaseException:
        """The error of a task that Prefect did not start. Its parents are recorded first, if they were not yet."""
        for parent in (self._tasks[name] for name in task.parents if name in self._tasks):
            if not parent.end.done():
                self._record(parent)
            if (failure := parent.end.exception()) is not None:
                return _not_started(task.name, parent.name, failure)
        return ParentFailedError(f"{task.name}: not started, because its inputs were not computed")

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow the tasks while the context lasts."""
        ended = threading.Event()
        # In a copy of this thread's context, which holds Prefect's settings.
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._follow, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _follow(self, ended: threading.Event) -> None:
        waiting: dict[Any, SubmittedTask] = {}
        known = 0
        while True:
            last = ended.is_set()
            new = list(self._tasks.values())[known:]
            # As concurrent futures: ray.wait turns a signal that interrupts it into a SystemError.
            waiting |= {task.future.wrapped_future.future(): task for task in new}
            known += len(new)
            for done in concurrent.futures.wait(waiting, timeout=0).done:
                task = waiting.pop(done)
                if not task.end.done():
                    self._record(task)
            if last:
                return
            self._on_poll()
            ended.wait(POLL_SECONDS)

    def _record(self, task: SubmittedTask) -> None:
        """Record the result or the failure of a task that has ended."""
        try:
            task.future.wait()
            state: State[Any] = task.future.state
            if state.is_crashed():
                crash_lost_task_run(task.future.task_run_id)
            if state.is_pending():
                raise self._parent_failed(task)
            if not state.is_completed():
                raise _error_of(task.name, state)
            parents_ended = [self._ends[parent] for parent in task.parents if parent in self._ends]
            seconds = time.perf_counter() - max([task.submitted, *parents_ended])
            result = self._on_result(task, state.result(), seconds)
        except BaseException as error:
            self._ends[task.name] = time.perf_counter()
            self._fail(task, error)
            # Without this, each descendant would start a process only to find that its input is missing.
            for descendant in self._descendants(task.name):
                self._cancel(descendant, _not_started(descendant.name, task.name, error))
        else:
            self._ends[task.name] = time.perf_counter()
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                task.end.set_result(result)

    def _descendants(self, name: str) -> list[SubmittedTask]:
        """The tasks that depend on `name`, directly or not, in order."""
        names, descendants = {name}, []
        for task in list(self._tasks.values()):
            if names & set(task.parents):
                names.add(task.name)
                descendants.append(task)
        return descendants


def _error_of(name: str, state: State[Any]) -> BaseException:
    """The error of a task that Prefect started, with the task's name in its text or in a note."""
    if state.is_cancelled():
        return StageInterruptedError(state.message)
    error = state.result(raise_on_failure=False)
    if not isinstance(error, BaseException):
        return RuntimeError(f"{name}: {state.message}")
    cause = root_cause(error)
    texts = "\n".join([str(cause), *getattr(cause, "__notes__", ())])
    if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", texts):
        cause.add_note(f"in stage {name}")
    return error


def _not_started(name: str, parent: str, error: BaseException) -> BaseException:
    """The error of a task that needs the result of `parent`, or of one that `parent` needs."""
    cause = root_cause(error)
    if isinstance(error, ParentFailedError):
        _, _, reason = str(error).partition(", because ")
    else:
        reason = f"{parent} failed ({type(cause).__name__}: {first_line(cause)})"
    return ParentFailedError(f"{name}: not started, because {reason}", cause)
