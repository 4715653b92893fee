"""Episodes in real processes: what one does wrong costs it alone."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from agents.environments import samples  # type: ignore[import-not-found]
from xray_runtime.agents.environments import supervisor
from xray_runtime.agents.environments.episodes import EnvironmentFailure
from xray_runtime.agents.environments.pool import EnvironmentPool
from xray_runtime.methods.common.environment_protocol import Step

TIMEOUT_S = 1.2
TASK = {"prompt": "p", "messages": []}


@pytest.fixture(autouse=True, scope="module")
def short_wait_for_a_pong() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "PONG_S", 0.3)
        yield


def pool_of(kind: type, num_workers: int = 1, **options: Any) -> EnvironmentPool:
    return EnvironmentPool(
        f"{samples.__name__}:{kind.__name__}", num_workers, **({"timeout_s": TIMEOUT_S, "memory_mb": 1024} | options)
    )


@pytest.fixture(scope="module")
def faulty() -> Iterator[EnvironmentPool]:
    with pool_of(samples.Faulty) as pool:
        yield pool


def started(pool: EnvironmentPool, *episodes: int, **task: Any) -> None:
    for future in [pool.reset(episode, TASK | task, seed=episode) for episode in episodes]:
        future.result(20)


def failure(future: Future[Any]) -> str:
    with pytest.raises(EnvironmentFailure) as caught:
        future.result(30)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def children() -> set[int]:
    """Descendants that run: of one that has ended the parent may be slow to hear."""
    running = psutil.Process().children(recursive=True)
    return {process.pid for process in running if process.status() != psutil.STATUS_ZOMBIE}


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    assert holds()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_number_is_guessed_in_every_episode() -> None:
    with pool_of(samples.Guess, num_workers=2) as pool:
        starts = [pool.reset(i, {"prompt": f"guess {i}", "messages": []}, seed=i) for i in range(6)]
        assert [future.result(20).messages for future in starts] == [
            [{"role": "user", "content": f"guess {i}"}] for i in range(6)
        ]
        bounds = dict.fromkeys(range(6), (0, 99))
        for turn in range(1, 9):
            guesses = {i: sum(bound) // 2 for i, bound in bounds.items()}
            answers = {i: pool.step(i, str(guess)) for i, guess in guesses.items()}
            for i, future in answers.items():
                step = future.result(20)
                if step.terminated:
                    assert step.reward == 1 / turn
                    del bounds[i]
                    continue
                side = step.messages[0]["content"]
                low, high = bounds[i]
                assert side in (f"higher ({turn})", f"lower ({turn})")
                bounds[i] = (guesses[i] + 1, high) if side.startswith("higher") else (low, guesses[i] - 1)
        assert not bounds


def test_async_episodes_run_side_by_side() -> None:
    with pool_of(samples.Sleeper, timeout_s=10.0) as pool:
        started(pool, *range(100))
        steps = [pool.step(i, "") for i in range(100)]
        assert max(future.result(20).info["most"] for future in steps) > 50


def test_tools_that_are_async() -> None:
    # Its tools' types are read by a library that takes seconds to load.
    with EnvironmentPool(f"{samples.__name__}:patient", 1, timeout_s=60.0, memory_mb=1024) as pool:
        pool.reset(0, TASK, 0).result(60)
        ask = '<tool_call>{"name": "add_later", "arguments": {"a": 2, "b": 3}}</tool_call>'
        assert pool.step(0, ask).result(20).messages == [{"role": "tool", "name": "add_later", "content": "5"}]
        assert pool.step(0, "p").result(20) == Step(reward=1.0, terminated=True)


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ("raise", r"episode 0: KeyError: 'no such\nroom'"),
        ("half", r"episode 0: ValueError: a lone surrogate: \ud800"),
        ("stop", "episode 0: RuntimeError: coroutine raised StopIteration"),
        ("leave", "episode 0: SystemExit: 3"),
        (
            "flood",
            "episode 0: ValueError: the content of the messages has 70,000 characters; at most 65,536 are allowed",
        ),
        ("nonsense", "episode 0: ValueError: step returned {'reward': 1.0}: must be a Step"),
        ("hang", "episode 0: took longer than 1.2 s"),
        ("block", "episode 0: took longer than 1.2 s"),
        ("exit 9", "episode 0: its process died twice with it: exit code 9"),
        ("eat", "episode 0: its process died twice with it: exit code 86, out of memory: memory_mb = 1024"),
    ],
)
def test_a_fault_costs_its_own_episode(faulty: EnvironmentPool, reply: str, cause: str) -> None:
    started(faulty, 0, 1, 2, 3)
    for i in (1, 2):
        assert faulty.step(i, "10").result(20).reward == 10 + i
    # One is in flight beside it, one has come to a state, one to none.
    others = [faulty.step(1, "slow"), faulty.step(0, reply)]
    assert failure(others[1]) == cause
    assert others[0].result(20).reward == 11
    assert [faulty.step(i, "100").result(20).reward for i in (1, 2, 3)] == [111, 112, 103]
    assert failure(faulty.step(0, "1")) == "episode 0: it was not reset, was closed, or has failed"
    # Its number may be used again.
    started(faulty, 0)
    assert faulty.step(0, "5").result(20).reward == 5


def test_long_info_and_faults_of_a_reset(faulty: EnvironmentPool) -> None:
    started(faulty, 0)
    assert "without its messages has 70," in failure(faulty.step(0, "info"))
    assert failure(faulty.reset(0, TASK | {"fault": "raise"}, seed=0)).startswith("episode 0: KeyError")
    with pytest.raises(ValueError, match="the task of episode 0 must be JSON"):
        faulty.reset(0, {"prompt": {1}}, seed=0)


def test_printed_text_is_not_an_answer(faulty: EnvironmentPool) -> None:
    started(faulty, 0)
    assert faulty.step(0, "print").result(20).reward == 0
    assert faulty.step(0, "2").result(20).reward == 2


def test_a_process_that_dies_once_costs_nothing(faulty: EnvironmentPool, tmp_path: Path) -> None:
    started(faulty, 0, 1)
    assert faulty.step(0, "4").result(20).reward == 4
    assert faulty.step(0, f"once {tmp_path / 'died'}").result(20).reward == 4
    assert faulty.step(1, "4").result(20).reward == 5


@pytest.mark.parametrize(("fault", "in_flight"), [(signal.SIGKILL, 0), (signal.SIGKILL, 3), (signal.SIGSTOP, 1)])
def test_a_killed_process_loses_no_episode(fault: signal.Signals, in_flight: int) -> None:
    before = children()
    with pool_of(samples.Faulty) as pool:
        started(pool, 0, 1, 2)
        for i in range(3):
            pool.step(i, "10").result(20)
        [pid] = children() - before
        answers = [pool.step(i, "slow") for i in range(in_flight)]
        os.kill(pid, fault)
        assert [future.result(20).reward for future in answers] == [10.0 + i for i in range(in_flight)]
        # A process that stands still is noticed when it is asked.
        assert [pool.step(i, "1").result(20).reward for i in range(3)] == [11, 12, 13]
        assert pid not in children()


def test_a_process_that_cannot_restart_is_not_the_episodes_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fickle.py").write_text(f"from {samples.__name__} import Faulty")
    monkeypatch.syspath_prepend(tmp_path)
    before = children()
    with EnvironmentPool("fickle:Faulty", 1, TIMEOUT_S, 1024) as pool:
        started(pool, 0)
        (tmp_path / "fickle.py").unlink()
        [pid] = children() - before
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="'fickle:Faulty' does not start: ModuleNotFoundError") as caught:
            pool.step(0, "1").result(20)
        assert not isinstance(caught.value, EnvironmentFailure)


def test_an_episode_in_flight_is_asked_for_nothing_else(faulty: EnvironmentPool) -> None:
    started(faulty, 0)
    first = faulty.step(0, "slow")
    assert "before its last answer came" in failure(faulty.step(0, "1"))
    assert first.result(20).reward == 0
    slow = faulty.step(0, "slow")
    faulty.close(0)
    assert failure(slow) == "episode 0: it was closed"


def test_episodes_are_closed(faulty: EnvironmentPool, tmp_path: Path) -> None:
    started(faulty, 0, log=str(tmp_path / "log"))
    faulty.step(0, "3").result(20)
    faulty.close(0)
    faulty.close(12)
    wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "closed at 3")


def test_a_blocked_loop_costs_the_episode_that_blocks_it() -> None:
    with pool_of(samples.Blocking) as pool:
        started(pool, *range(4))
        steps = [pool.step(i, "block" if i == 2 else "1") for i in range(4)]
        assert failure(steps[2]) == "episode 2: took longer than 1.2 s"
        assert [steps[i].result(20).reward for i in (0, 1, 3)] == [1, 2, 4]


def test_forked_children_end_with_a_hanging_episode(faulty: EnvironmentPool, tmp_path: Path) -> None:
    started(faulty, 0, 1)
    before = children()
    assert failure(faulty.step(0, f"fork {tmp_path / 'pid'}")) == "episode 0: took longer than 1.2 s"
    assert faulty.step(1, "1").result(20).reward == 2
    wait_until(lambda: not runs(int((tmp_path / "pid").read_text())))
    wait_until(lambda: len(children()) == len(before))


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        ("no_such_module:X", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{samples.__name__}:Half", f"ValueError: {samples.__name__}:Half has no method 'step'"),
        (f"{samples.__name__}:Missing", "AttributeError: module"),
    ],
)
def test_a_worker_that_does_not_start(environment: str, cause: str) -> None:
    before = children()
    with pytest.raises(RuntimeError, match=f"the environment '{environment}' does not start: {cause}"):
        EnvironmentPool(environment, 1, timeout_s=1.0, memory_mb=1024)
    wait_until(lambda: children() == before)


def test_a_constructor_that_fails_and_the_log(tmp_path: Path) -> None:
    with EnvironmentPool(f"{samples.__name__}:broken", 1, TIMEOUT_S, 1024) as pool:
        assert failure(pool.reset(0, TASK, 0)) == "episode 0: OSError: no display"
    with pool_of(samples.Faulty, log_path=tmp_path / "log") as pool:
        started(pool, 0)
        pool.step(0, "print").result(20)
    assert '{"id": 0' in (tmp_path / "log").read_text()


def test_nothing_is_left_after_shutdown_and_collection(tmp_path: Path) -> None:
    before = children()
    pool = pool_of(samples.Faulty)
    started(pool, 0, log=str(tmp_path / "log"))
    started(pool, 1)
    hanging = pool.step(1, "hang")

    def is_shut_down(future: Future[Step]) -> None:
        with pytest.raises(RuntimeError, match=r"^the pool was shut down$") as caught:
            future.result(20)
        assert not isinstance(caught.value, EnvironmentFailure)

    ending = threading.Thread(target=pool.shutdown)
    ending.start()
    is_shut_down(hanging)
    # The process still waits for the one that hangs.
    is_shut_down(pool.step(0, "1"))
    ending.join()
    is_shut_down(pool.step(0, "1"))
    assert (tmp_path / "log").read_text() == "closed at 0"
    assert children() == before
    pool = pool_of(samples.Faulty)
    assert children() != before
    started(pool, 0)
    del pool
    gc.collect()
    assert children() == before


@pytest.mark.parametrize("last", ["hang", "block"])
def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path, last: str) -> None:
    script = f"""
import sys
from xray_runtime.agents.environments.pool import EnvironmentPool
pool = EnvironmentPool("agents.environments.samples:Faulty", 1, 100.0, 1024)
[pool.reset(i, {{}}, 0).result() for i in range(2)]
pool.step(0, "fork {tmp_path / "pid"}")
while sys.stdin.readline():
    pool.step(1, "{last}")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE)
    try:
        wait_until((tmp_path / "pid").exists)
        wait_until(lambda: (tmp_path / "pid").read_text() != "")
        assert parent.stdin is not None
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        time.sleep(0.3)  # enough for the last step to begin, most of the time
        below = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdin.close()
    assert len(below) == 3
    wait_until(lambda: not any(map(runs, below)))
