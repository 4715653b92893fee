"""Limits grow with the load; a niceness reaches every thread and is never taken back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from xray_runtime.kernel import cores

NICE = """
import os, threading
from xray_runtime.kernel.cores import give_way
held, begun = threading.Event(), os.nice(0)
threading.Thread(target=held.wait, daemon=True).start()
os.nice(2)
for wanted in (0, 7, 3):
    give_way(begun + wanted)
    print(sorted({os.getpriority(os.PRIO_PROCESS, int(t)) - begun for t in os.listdir("/proc/self/task")}))
"""


@pytest.mark.parametrize(("waiting", "expected"), [(0.4, 1.0), (2.0, 1.0), (22.0, 11.0)])
def test_the_load_is_counted_for_each_core(monkeypatch: pytest.MonkeyPatch, waiting: float, expected: float) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (waiting, 0.0, 0.0))
    assert cores.load() == expected


def test_every_thread_gives_way_and_none_less_than_before() -> None:
    done = subprocess.run([sys.executable, "-c", NICE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[0, 2]", "[7]", "[7]"]
