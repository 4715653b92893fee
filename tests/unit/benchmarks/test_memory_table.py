"""The table of `benchmarks.memory`: what a process holds, and which process it is."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.memory import Peak, held, kind_of

MIB = 2**20
SIZE = 64


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_memory_of_a_fork_counts_once() -> None:
    before = held(os.getpid())
    # Pages that no allocator had before.
    content = mmap.mmap(-1, SIZE * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    content.write(os.urandom(MIB) * SIZE)
    alone = held(os.getpid())
    assert SIZE - 1 < alone.held - before.held < SIZE + 8
    assert alone.private - before.private > SIZE - 1
    fork, (mine, other) = multiprocessing.get_context("fork"), multiprocessing.Pipe()

    def wait() -> None:
        other.recv()

    child = fork.Process(target=wait)
    child.start()
    peak = Peak()
    peak.look([psutil.Process(), psutil.Process(child.pid)])
    both = [held(pid) for pid in (os.getpid(), child.pid or 0)]
    mine.send(None)
    child.join()
    assert len(content) == SIZE * MIB
    # Half of the shared pages each.
    assert sum(one.held for one in both) < alone.held + 16
    assert both[0].shared > SIZE / 2 - 1
    assert peak.total == pytest.approx(sum(one.held for one in both), abs=16)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["ray::Learner.train()"], "ray::Learner.train"),
        (["/x/raylet", "--python_worker_command=tail"], "Ray: raylet"),
        (["python", "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"], "Prefect's server"),
        (["python", "-m", "xray.cli.runner", "job.json"], "the run"),
        (["python", "-m", "xray.cli.main", "run", "configs/tiny.yaml"], "supervisor of the run"),
        (["python", "-m", "xray.deployments.fork_server", "/x"], "fork server"),
        (["/usr/bin/sleep", "9"], "sleep"),
    ],
)
def test_kinds_of_processes(words: list[str], kind: str) -> None:
    process: Any = SimpleNamespace(cmdline=lambda: words, status=lambda: "sleeping", pid=os.getpid())
    # This process may have loaded the libraries that a fork server is told by.
    assert kind_of(process).partition(" + ")[0] == kind


def test_a_process_that_ended_holds_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    gone: Any = SimpleNamespace(cmdline=lambda: ["x"], status=lambda: "sleeping", pid=process.pid)
    peak = Peak()
    peak.look([gone])
    assert (peak.total, peak.kinds) == (0.0, {})
