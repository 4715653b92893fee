"""The process a person starts: it watches over the run, which is its child, and starts it again when it is lost.

Everything a run has finished is found again under its key, and a stage at work goes on from its snapshot, so starting
again is all that is ever needed, whatever died: the driver, Ray, a server, the machine's patience (a run that makes no
progress for `runtime.stall_timeout_s` is ended). This is the one place where that is decided.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console

from xray.deployments.local_services import LOST
from xray_runtime.files import write_atomic
from xray_runtime.processes import kill_tagged, start_reaper

FAILED, INTERRUPTED = 1, 130
POLL_SECONDS = 0.2
ENDED = "ended"
"""File beside a job's that its process leaves when it ends by itself."""


def supervise(output: Path, *, restarts: int, stall_timeout_s: float, console: Console, **job: Any) -> int:
    """Run a job to an end; returns the exit code.

    Args:
        output: directory of logs and of what the job makes.
        job: the other fields of a `runner.Job`.
    """
    from xray.cli.runner import Job

    place = output / "jobs" / uuid.uuid4().hex[:12]
    place.mkdir(parents=True)
    heartbeat, file = place / "heartbeat", place / "job.json"
    ended = place / ENDED
    write_atomic(file, Job(output=output, heartbeat=heartbeat, **job).model_dump_json())
    command = [sys.executable, "-m", "xray.cli.runner", str(file)]
    tag = start_reaper()
    code = FAILED
    try:
        for attempt in range(restarts + 1):
            code = _run_once(heartbeat, command, stall_timeout_s, console)
            kill_tagged(tag)
            if code > 0 and code != INTERRUPTED and not ended.exists():
                # A check of Ray's that fails ends the whole process, with an ordinary exit code and no exception.
                code = LOST
            if 0 <= code < LOST or code == INTERRUPTED:
                return code
            reason = f"killed by {signal.Signals(-code).name}" if code < 0 else "Ray or Prefect died"
            again = f"starting again ({attempt + 1} of {restarts})" if attempt < restarts else "giving up"
            console.print(f"the run was lost ({reason}); {again}", style="yellow", highlight=False)
    finally:
        for left in (heartbeat, file, ended):
            left.unlink(missing_ok=True)
        place.rmdir()
    return FAILED


def _run_once(heartbeat: Path, command: list[str], stall_timeout_s: float, console: Console) -> int:
    heartbeat.touch()
    # A group of its own: Ctrl-C reaches this process alone, which passes it on once.
    child = subprocess.Popen(command, process_group=0)
    asked = 0

    def ask(*_: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            console.print("stopping after the current step, with a snapshot; press Ctrl-C again to stop at once")
            child.send_signal(signal.SIGINT)
        else:
            child.kill()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while (code := child.poll()) is None:
            if time.time() - heartbeat.stat().st_mtime > stall_timeout_s:
                console.print(f"no progress for {stall_timeout_s:.0f} s: ending the run", style="yellow")
                child.kill()
            time.sleep(POLL_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return INTERRUPTED if asked else code
