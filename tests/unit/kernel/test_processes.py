"""Nothing outlives the run that started it, whatever it is and however the run ends: real processes, real signals."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.waiting import wait_until
from xray_runtime.kernel import processes
from xray_runtime.kernel.processes import TAG, kill_tagged, return_pages, tagged, without_collection

Start = Callable[..., subprocess.Popen[str]]

SLEEP = "import time; time.sleep(120)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(120)"
)
# What a child starts in a session of its own, and outlives it: no process group or parent leads there any more.
ORPHAN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""
# A run: starts its reaper, starts children of every kind, says their pids, and ends as its last line says.
RUN = f"""
import os, subprocess, sys, time
from xray_runtime.kernel.processes import start_reaper
print(start_reaper(), flush=True)
def start(code):
    return subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE)
plain, parent = start({SLEEP!r}), start({ORPHAN!r})
pids = [plain.pid, int(parent.stdout.readline())]
parent.wait()
"""
WITH_A_STUBBORN_ONE = f"""
stubborn = start({STUBBORN!r})
stubborn.stdout.readline()
pids.append(stubborn.pid)
"""
WITH_A_FORK = """
forked = os.fork()
if not forked:
    time.sleep(120)
"""
UNTIL_A_SIGNAL = "print(*pids, flush=True); time.sleep(120)"
UNTIL_THE_END = "print(*pids, flush=True); sys.stdin.readline()"


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python code, with a process tag or without; whatever is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def launch(code: str, tag: str | None = None) -> subprocess.Popen[str]:
        hidden = (TAG, "PYTHONUNBUFFERED")
        environment = {k: v for k, v in os.environ.items() if k not in hidden} | ({TAG: tag} if tag else {})
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **pipes))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_only_what_carries_the_tag_is_ended(start: Start) -> None:
    ours, other, untagged = start(SLEEP, "tag-a"), start(SLEEP, "tag-b"), start(SLEEP)
    # A tag is the whole word.
    longer = start(SLEEP, "tag-a-too")
    assert [p.pid for p in tagged("tag-a")] == [ours.pid]
    kill_tagged("tag-a")
    assert ours.wait(60) == -signal.SIGTERM
    assert [p.poll() for p in (other, untagged, longer)] == [None, None, None]
    assert tagged("tag-a") == []
    kill_tagged("tag-a")  # nothing left to end


def test_who_asks_is_spared(start: Start) -> None:
    """The command tags itself, then cleans up after itself and still has to say how it went."""
    code = "from xray_runtime.kernel.processes import *; print(len(tagged('tag-c'))); kill_tagged('tag-c')"
    process = start(code + "; print('still here')", "tag-c")
    assert (said(process), said(process)) == ("0", "still here")


def test_who_ignores_the_request_is_killed(start: Start) -> None:
    stubborn = start(STUBBORN, "tag-d")
    assert said(stubborn) == "up"
    begin = time.monotonic()
    kill_tagged("tag-d", 0.5)
    assert stubborn.wait(60) == -signal.SIGKILL
    # It had its time to end by itself.
    assert time.monotonic() - begin >= 0.5


def test_orphans_of_a_dead_child_are_found(start: Start) -> None:
    parent = start(ORPHAN, "tag-e")
    orphan = int(said(parent))
    assert parent.wait(60) == 0
    assert [p.pid for p in tagged("tag-e")] == [orphan]
    kill_tagged("tag-e")
    assert gone([orphan], 60)


def begun(run: subprocess.Popen[str]) -> tuple[str, list[int], psutil.Process]:
    """(tag, pids of children, reaper) of a run that is up."""
    tag, pids = said(run), [int(pid) for pid in said(run).split()]
    [reaper] = [p for p in psutil.Process(run.pid).children() if "xray_runtime.kernel.processes" in p.cmdline()]
    assert all(map(alive, pids))
    # A program that is just being started has no environment yet.
    wait_until(lambda: {p.pid for p in tagged(tag)} == set(pids), seconds=20)
    return tag, pids, reaper


def test_a_killed_run_leaves_nothing(start: Start) -> None:
    run, bystander = start(RUN + WITH_A_STUBBORN_ONE + UNTIL_A_SIGNAL), start(SLEEP)
    _, pids, reaper = begun(run)
    assert len(pids) == 3
    run.kill()
    run.wait(60)
    # The stubborn one has its time; the reaper goes when its work is done.
    assert gone([*pids, reaper.pid], processes.GRACE_SECONDS + 60)
    assert bystander.poll() is None


def test_a_run_that_ends_by_itself_leaves_nothing(start: Start) -> None:
    run = start(RUN + UNTIL_THE_END)
    _, pids, reaper = begun(run)
    assert run.communicate("\n", timeout=5) == ("", None)
    assert run.returncode == 0
    assert gone([*pids, reaper.pid], 60)


def test_the_reaper_is_deaf_to_what_ends_a_terminal(start: Start) -> None:
    run = start(RUN + UNTIL_A_SIGNAL)
    _, pids, reaper = begun(run)
    assert os.getsid(reaper.pid) == reaper.pid != os.getsid(run.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        reaper.send_signal(number)
    run.terminate()
    assert run.wait(60) == -signal.SIGTERM
    assert gone([*pids, reaper.pid], 60)


def test_a_fork_does_not_keep_the_run_alive(start: Start) -> None:
    """A forked copy of the run holds its open files, but the run has ended when the run has ended."""
    run = start(RUN + WITH_A_FORK + "print(*pids, flush=True); print(forked, flush=True); time.sleep(120)")
    _, pids, reaper = begun(run)
    forked = psutil.Process(int(said(run)))
    run.kill()
    run.wait(60)
    try:
        assert gone([*pids, reaper.pid], 60)
    finally:
        forked.kill()


def test_output_goes_to_the_file_also_from_children(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "deeper" / "noise.log"
    path.parent.mkdir()
    path.write_text("what was there\n")
    code = f"""
import os, pathlib, subprocess, sys
from xray_runtime.kernel.processes import redirect_output
print("before")  # still in Python's buffer: it belongs where output went until now
redirect_output(pathlib.Path({str(path)!r}))
print("from Python", flush=True)
print("an error", file=sys.stderr, flush=True)
os.write(1, b"from C\\n")
subprocess.run([sys.executable, "-c", "print('from a child')"])
redirect_output(pathlib.Path({str(tmp_path / "new" / "other.log")!r}))
print("elsewhere")
"""
    process = start(code)
    assert process.communicate(timeout=30)[0] == "before\n"
    assert process.returncode == 0
    assert path.read_text() == "what was there\nfrom Python\nan error\nfrom C\nfrom a child\n"
    assert (tmp_path / "new" / "other.log").read_text() == "elsewhere\n"


def test_an_import_runs_without_the_collector_which_is_then_as_before() -> None:
    assert gc.isenabled()
    with contextlib.suppress(ImportError), without_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_whole_pages_are_returned_and_others_keep_what_they_hold() -> None:
    def held() -> int:
        return psutil.Process().memory_info().rss - psutil.Process().memory_info().shared

    size = 2**26
    memory = np.ones(size, np.uint8)
    before = held()
    # From within a page to within another.
    return_pages(memory.ctypes.data + 5, size - 10)
    assert before - held() > 0.9 * size
    assert memory[:5].all()
    assert memory[-5:].all()
    assert memory.sum() < 2 * mmap.PAGESIZE
    return_pages(memory.ctypes.data + 5, mmap.PAGESIZE - 10)  # no whole page


SPARED = """
import gc, weakref
from xray_runtime.kernel.processes import MANY_OBJECTS, spare_imports
gc.disable()
class Node: pass
def ring():
    a, b = Node(), Node()
    a.other, b.other = b, a
    return a
kept = [ring() for _ in range(MANY_OBJECTS)]
garbage = weakref.ref(ring())
spare_imports()
assert garbage() is None
spared = gc.get_freeze_count()
assert spared > MANY_OBJECTS
few = [ring() for _ in range(10)]
spare_imports()
assert gc.get_freeze_count() == spared
del few
assert gc.collect() >= 20, "what came later is collected"
"""


def test_many_objects_are_spared_and_their_garbage_is_not() -> None:
    subprocess.run([sys.executable, "-c", SPARED], check=True)
