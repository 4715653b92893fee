"""A lifecycle on a busy machine, killed while it starts, must resume and end with the bytes of an undisturbed one.

`python -m tests.chaos.busy DIRECTORY` runs the baseline lifecycle, unless DIRECTORY has one, and then the same next to
twenty processes that compute. It kills driver, GCS server and raylet as soon as each has started, then the command
itself, and finally lets the command finish. It prints what happened; exit code 0 means that nothing was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.chaos.harness import BASELINE, TARGETS, Command, Lifecycle, differences, none_left, outcome, run
from xray_runtime.kernel.processes import start_reaper

PROCESSES = 20
KILLED = ("driver", "gcs", "raylet")
LIMIT_SECONDS = 5400.0


@contextlib.contextmanager
def busy(processes: int = PROCESSES) -> Iterator[None]:
    """Run this many computing processes while the context lasts."""
    # If this process is killed, the reaper ends them.
    start_reaper()
    computing = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in computing:
            process.kill()
            process.wait()


def await_process(root: subprocess.Popen[bytes], pattern: str, deadline: float) -> psutil.Process:
    """The first descendant of `root` whose command line contains `pattern`."""
    while time.monotonic() < deadline and root.poll() is None:
        for process in psutil.Process(root.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if pattern in " ".join(process.cmdline()):
                    return process
        time.sleep(0.05)
    raise TimeoutError(f"{pattern}: did not start, or the command ended with {root.poll()}")


def kill_while_starting(command: Command) -> None:
    """Kill the processes of `command` while they start; prints what happened."""
    begin = time.monotonic()
    deadline = begin + LIMIT_SECONDS
    process = command.start()
    try:
        for target in KILLED:
            await_process(process, TARGETS[target], deadline).kill()
            _print(begin, f"{target} killed while it started")
        await_process(process, "ray::", deadline)
        process.kill()
        process.wait()
        none_left(command.mark, LIMIT_SECONDS)
        _print(begin, f"command killed, {_status(command.output)}")
        process = command.start()
        code = process.wait(timeout=deadline - time.monotonic())
        _print(begin, f"ended with {code}, {_status(command.output)}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)


def _print(begin: float, text: str) -> None:
    print(f"{time.monotonic() - begin:4.0f} s: {text}", flush=True)


def _status(output: Path) -> str:
    record = output / "lifecycle.json"
    return f"lifecycle.json: {json.loads(record.read_text())['status']}" if record.exists() else "no lifecycle.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--config", default="configs/tiny.yaml")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    options = parser.parse_args()
    lifecycle, directory = Lifecycle(config=options.config), options.directory
    if not (directory / BASELINE / "lifecycle.json").exists():
        run(directory / BASELINE, [], lifecycle)
    with busy(options.processes):
        time.sleep(5)
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
        command = Command(directory / f"busy-{uuid.uuid4().hex[:6]}", lifecycle, uuid.uuid4().hex)
        kill_while_starting(command)
    found = differences(outcome(directory / BASELINE), outcome(command.output))
    print(found or "nothing lost")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
