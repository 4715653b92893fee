"""What `benchmarks.peers` measures with: TRL's environment and process, memory of processes, the points of a stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import xray
from benchmarks.machine import MIB
from xray_runtime.kernel.report.figures import read_metrics
from xray_runtime.kernel.tracking.recorder import METRICS, read_points, records_directory

ROOT = Path(__file__).parents[1]
SETTLE_S, SETTLE_POLL_S, BUSY_PERCENT = 120.0, 3.0, 10.0
MEMORY_S = 2.0
"""Seconds between looks at memory: each takes the kernel some milliseconds."""

Series = dict[str, list[float]]


def environment(root: Path, version: str) -> Path:
    """The Python of an environment with that TRL, made where there is none."""
    python = root / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", root], check=True)
        # The same torch and transformers on both sides: a difference is then TRL's and X-ray's.
        shared = root / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages" / "shared.pth"
        shared.write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", f"trl=={version}"], check=True)
    return python


@dataclass
class Measured:
    """One turn of a method."""

    seconds: list[float]
    """Seconds of each update that counts."""
    curve: list[float]
    """Loss, or mean reward, of each update."""
    lengths: list[float]
    """Mean tokens of the sampled replies of each update."""
    peak: float
    """MiB of all processes."""


def run_module(name: str, *arguments: str) -> None:
    """A process of its own, which ends with all that it started. Its messages go to this process's stderr."""
    subprocess.run([sys.executable, "-m", name, *arguments], cwd=ROOT, check=True, stdout=sys.stderr)


def settled() -> float:
    """The machine's load once it is idle, or after SETTLE_S."""
    until = time.monotonic() + SETTLE_S
    while psutil.cpu_percent(interval=SETTLE_POLL_S) > BUSY_PERCENT and time.monotonic() < until:
        pass
    return os.getloadavg()[0]


class TRL:
    """A process that has imported TRL and trains in forked copies of itself."""

    def __init__(self, root: Path, version: str) -> None:
        command = [str(environment(root / f"trl-{version}", version)), "-m", "benchmarks.peers_trl"]
        self._log = (root / f"trl-{version}.log").open("w+")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        self._lines()

    def _lines(self) -> list[dict[str, Any]]:
        """Updates up to the end of a task. Raises RuntimeError if it failed."""
        found, out = [], self._process.stdout
        assert out is not None
        for line in out:
            if line.startswith('{"'):
                found.append(json.loads(line))
            if line in ("READY\n", "DONE 0\n"):
                return found
            if line.startswith("DONE"):
                break
        self._log.seek(0)
        raise RuntimeError(f"TRL failed: {self._log.read()[-2000:]}")

    def train(self, task: Path) -> tuple[list[dict[str, Any]], float]:
        """(seconds and logs of each update, peak memory in MiB)."""
        assert self._process.stdin is not None
        process = psutil.Process(self._process.pid)
        with peak_memory(lambda: [process, *process.children()]) as peak:
            print(task, file=self._process.stdin, flush=True)
            return self._lines(), peak()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def own_memory(processes: list[psutil.Process]) -> float:
    """MiB that processes hold together, files that they only map left out: a page of several forks counts once."""
    total = 0.0
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it ended
            continue
        fields = dict(line.split(":", 1) for line in lines[1:])
        total += sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024 / MIB
    return total


@contextmanager
def peak_memory(processes: Callable[[], list[psutil.Process]]) -> Iterator[Callable[[], float]]:
    """A function that gives the largest `own_memory` so far."""
    ended, found = threading.Event(), [0.0]

    def look() -> None:
        while not ended.wait(MEMORY_S):
            found.append(own_memory(processes()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: max([*found, own_memory(processes())])
    finally:
        ended.set()
        thread.join()


def series(result: xray.Result, output: Path) -> Series:
    """Metric → its value at each iteration."""
    found = read_metrics(records_directory(output, result.stage.name, result.stage.key) / METRICS)
    return {name: [value for _, value in points] for name, points in found.items()}


def steps(result: xray.Result, output: Path) -> list[dict[str, float]]:
    """Metrics of each step, with its `seconds` where nothing but the step was done: the first has no start, and some
    also measure held-out rows."""
    points = read_points(records_directory(output, result.stage.name, result.stage.key) / METRICS)
    by_step: dict[int, dict[str, float]] = {}
    last = None
    for point in points:
        found = by_step.setdefault(point["step"], {})
        found |= point["metrics"]
        if last is not None and not any("heldout" in name for name in found):
            found["seconds"] = (point["time_ms"] - last) / 1e3
        last = point["time_ms"]
    return [by_step[step] for step in sorted(by_step)]
