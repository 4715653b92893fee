"""Where the seconds of a lifecycle go: when each stage runs, when each process starts, and how much CPU time it uses.

    python -m benchmarks.startup [configs/tiny.yaml] [--set key.path=value …] [--output runs/startup]

The lifecycle runs as a person starts it, into a new directory, and then once more, wholly cached. A stage begins and
ends as its run in MLflow does. `busy` is the processor time of all processes together, by that of all cores: where it
is low, something waits.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.machine import machine, table
from benchmarks.memory import ROOT, kind_of
from xray_runtime.kernel.cores import usable_cores

LOOK_S = 0.1
STAGES = """
    SELECT name, start_time / 1000.0, end_time / 1000.0 FROM runs
    WHERE run_uuid IN (SELECT run_uuid FROM tags WHERE key = 'mlflow.parentRunId') ORDER BY start_time"""
"""Name, begin and end of the runs that belong to another run."""


@dataclass
class SeenProcess:
    start: float
    """Seconds since the command began."""
    kinds: list[str] = field(default_factory=list)
    """Its names in order: Ray renames an idle worker when it gets work."""
    used: float = 0.0
    """Processor seconds."""


@dataclass
class Timeline:
    begin: float
    seconds: float
    processes: list[SeenProcess]
    looks: list[tuple[float, float]]
    """Seconds since the begin, processor seconds of all processes by then."""

    def busy(self, begin: float, end: float) -> float:
        """Processor time between two times, by that of all cores."""
        first, last = (max((used for at, used in self.looks if at <= time), default=0.0) for time in (begin, end))
        return (last - first) / (end - begin) / usable_cores() if end > begin else 0.0


def timeline(command: list[str]) -> Timeline:
    """Run a command to its end. Raises SystemExit if it fails."""
    seen: dict[psutil.Process, SeenProcess] = {}
    looks: list[tuple[float, float]] = []
    begin = time.time()
    command_process = psutil.Popen([sys.executable, *command], cwd=ROOT, stdout=sys.stderr)
    while command_process.poll() is None:
        with contextlib.suppress(psutil.Error):
            for process in (command_process, *command_process.children(recursive=True)):
                _look(process, seen, begin)
        looks.append((time.time() - begin, sum(process.used for process in seen.values())))
        time.sleep(LOOK_S)
    if command_process.returncode:
        sys.exit(f"the run ended with exit code {command_process.returncode}")
    return Timeline(begin, time.time() - begin, list(seen.values()), looks)


def _look(process: psutil.Process, seen: dict[psutil.Process, SeenProcess], begin: float) -> None:
    with contextlib.suppress(OSError, psutil.Error):
        one = seen.setdefault(process, SeenProcess(max(process.create_time() - begin, 0.0)))
        times = process.cpu_times()
        one.used = times.user + times.system
        kind = kind_of(process)
        if kind not in ("ended", *one.kinds):
            one.kinds.append(kind)


def stages(output: Path) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of the stages of a new output directory's run."""
    with contextlib.closing(sqlite3.connect(output / "mlflow.db")) as database:
        yield from database.execute(STAGES)


def show(run: Timeline, output: Path) -> None:
    rows, before = [], 0.0
    for name, *times in [*stages(output), ("end", run.begin + run.seconds, run.begin + run.seconds)]:
        begin, end = (time - run.begin for time in times)
        cells = (before, begin - before, 100 * run.busy(before, begin), end - begin, 100 * run.busy(begin, end))
        rows.append(
            (name, *(f"{cell:.1f}" for cell in cells[:2]), f"{cells[2]:.0f}", f"{cells[3]:.1f}", f"{cells[4]:.0f}")
        )
        before = end
    table(("stage", "stage before ended, s", "until it began, s", "busy, %", "it took, s", "busy, %"), rows)
    print()
    parts = sorted(run.processes, key=lambda process: process.start)
    table(
        ("process", "started at, s", "processor time, s"),
        [(" → ".join(p.kinds), f"{p.start:.1f}", f"{p.used:.1f}") for p in parts if p.used >= 0.1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/tiny.yaml")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, default=Path("runs/startup"))
    options = parser.parse_args()
    output = options.output.absolute()
    if output.exists():
        sys.exit(f"--output: {output} exists; remove it first: a stage in its store would not be computed")
    changes = [option for change in options.changes for option in ("--set", change)]
    command = ["-m", "xray.cli.main", "run", options.config, "--output", str(output), *changes]
    print(machine(), flush=True)
    run = timeline(command)
    again = timeline(command)
    print(f"\n{run.seconds:.1f} s; {sum(p.used for p in run.processes):.0f} s of the processor\n")
    show(run, output)
    used = sum(p.used for p in again.processes)
    print(f"\nwholly cached: {again.seconds:.1f} s; {used:.1f} s of the processor")


if __name__ == "__main__":
    main()
