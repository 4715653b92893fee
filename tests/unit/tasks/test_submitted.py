"""Submitted tasks: results, failures and what depends on them. Prefect's futures are faked to choose how tasks end."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from xray.tasks import submitted
from xray.tasks.submitted import ParentFailedError, SubmittedTask, SubmittedTasks
from xray_runtime.kernel.errors import StageInterruptedError, root_cause


@dataclass
class Task:
    """A Prefect future whose end the test chooses."""

    value: Any = None
    error: Exception | None = None
    was_started: bool = True
    ray: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    @property
    def wrapped_future(self) -> Any:
        return SimpleNamespace(future=lambda: self.ray, task=self)

    def wait(self) -> None: ...

    @property
    def state(self) -> Any:
        return SimpleNamespace(
            is_crashed=lambda: False,
            message=f"Upstream task run '{id(self)}' did not reach a 'COMPLETED' state.",
            is_completed=lambda: self.was_started and self.error is None,
            is_pending=lambda: not self.was_started,
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
    error = KeyError("x")
    with tasks.following():
        futures["a"].end(error=error)
        with pytest.raises(ParentFailedError, match=r"^c: not started, because a failed \(KeyError: 'x'\)$") as caught:
            tasks.result("c")
        assert root_cause(caught.value) is error
        futures["other"].end(1)
        assert tasks.result("other") == 2
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
        with pytest.raises(StageInterruptedError, match=r"^b: not started, because the run was stopped$"):
            tasks.result("b")


def test_each_task_raises_its_own_failure_with_its_name(cancelled: list[Task]) -> None:
    tasks, futures = of(a=[], b=[], of_a=["a"])
    with tasks.following():
        futures["a"].end(error=RuntimeError("no space left"))
        futures["b"].end(error=ValueError("b.lr: -1 is not allowed"))
        with pytest.raises(RuntimeError, match="no space left") as of_a:
            tasks.result("a")
        with pytest.raises(ValueError, match=r"b\.lr") as of_b:
            tasks.result("b")
        with pytest.raises(ParentFailedError, match=r"^of_a: .*, because a failed \(RuntimeError: no space left\)$"):
            tasks.result("of_a")
    # A text that names the stage needs no note.
    assert (of_a.value.__notes__, getattr(of_b.value, "__notes__", [])) == (["in stage a"], [])


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "b", "a"]])
def test_a_task_that_prefect_did_not_start_says_which_stage_failed(cancelled: list[Task], order: list[str]) -> None:
    """Prefect names only the id of a task run, and may end a descendant before its parent is recorded."""
    tasks, futures = of(a=[], b=["a"], c=["b"])
    futures["b"].was_started = futures["c"].was_started = False
    for name in order:
        futures[name].end(error=RuntimeError("no space left") if name == "a" else None)
    with tasks.following():
        for name in ("b", "c"):
            said = rf"^{name}: not started, because a failed \(RuntimeError: no space left\)$"
            with pytest.raises(ParentFailedError, match=said):
                tasks.result(name)
