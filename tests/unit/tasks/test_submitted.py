"""Submitted tasks: results, failures and what depends on them. Prefect's futures are faked to choose how tasks end."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from xray.tasks import submitted
from xray.tasks.submitted import ParentFailedError, SubmittedTask, SubmittedTasks


@dataclass
class Task:
    """A Prefect future whose end the test chooses."""

    value: Any = None
    error: Exception | None = None
    ray: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    @property
    def wrapped_future(self) -> Any:
        return SimpleNamespace(future=lambda: self.ray, task=self)

    def wait(self) -> None: ...

    @property
    def state(self) -> Any:
        return SimpleNamespace(
            is_crashed=lambda: False,
            is_completed=lambda: self.error is None,
            is_pending=lambda: False,
            is_cancelled=lambda: False,
            result=lambda raise_on_failure=True: self.error or self.value,
        )

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error
        self.ray.set_result(None)


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    found: list[Task] = []
    monkeypatch.setattr(submitted.ray, "cancel", lambda ref: found.append(ref.task))
    return found


def doubled(task: SubmittedTask, value: Any, seconds: float) -> Any:
    assert seconds >= 0
    return 2 * value


def of(**parents: list[str]) -> tuple[SubmittedTasks, dict[str, Task]]:
    tasks, futures = SubmittedTasks(doubled, lambda: None), {name: Task() for name in parents}
    for name, future in futures.items():
        tasks.add(name, future, parents[name])
    return tasks, futures


def test_results_are_recorded_and_waited_for() -> None:
    tasks, futures = of(a=[], b=["a"])
    with tasks.following():
        assert tasks.finished("a") is None
        futures["a"].end(1)
        assert tasks.result("a") == 2
        assert (tasks.has_ended("a"), tasks.has_ended("b"), tasks.all_ended()) == (True, False, False)
        tasks.wait(0.05)
        futures["b"].end(3)
        tasks.wait()
    assert (tasks.all_ended(), tasks.finished("b")) == (True, 6)
    tasks.raise_failure()


def test_a_failure_cancels_its_descendants_alone(cancelled: list[Task]) -> None:
    tasks, futures = of(a=[], b=["a"], c=["b"], other=[])
    error = KeyError("a")
    with tasks.following():
        futures["a"].end(error=error)
        with pytest.raises(KeyError) as caught:
            tasks.result("c")
        assert caught.value is error
        futures["other"].end(1)
        tasks.wait()
    assert cancelled == [futures["b"], futures["c"]]
    assert tasks.finished("other") == 2
    assert tasks.has_failed_with(error)
    with pytest.raises(KeyError):
        tasks.raise_failure()


def test_tasks_that_wait_for_others_are_cancelled_and_those_on_given_checkpoints_go_on(cancelled: list[Task]) -> None:
    tasks, futures = of(a=[], b=["a"], on_checkpoint=["base@1234"])
    with tasks.following():
        tasks.cancel_waiting()
        assert cancelled == [futures["b"]]
        futures["a"].end(1)
        futures["on_checkpoint"].end(2)
        tasks.wait()
        assert (tasks.finished("a"), tasks.finished("on_checkpoint")) == (2, 4)
        with pytest.raises(ParentFailedError, match=r"^b: not started, because a stage it depends on failed$"):
            tasks.result("b")
