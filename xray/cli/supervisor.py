"""The supervisor of a run: it monitors the run in a child process, and restarts it when it is lost.

Finished stages are found by their keys and an unfinished stage continues from its snapshot, so a restart is the remedy
for every failure. A run without progress for `runtime.stall_timeout_s` is killed and restarted.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from xray.cli.exit_codes import FAILED, INTERRUPTED
from xray.cli.job import SIGNALS, Job
from xray.deployments.patience import LOST
from xray.flows.subject import Subject
from xray.tasks.lost_runs import close_lost_runs, command_to_close, outputs_in
from xray.tasks.output_directory import resume_point
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.network import check_addresses
from xray_runtime.kernel.processes import end_well, kill_tagged, start_reaper

POLL_SECONDS = 0.2


def supervise(output: Path, subject: Subject, runtime: RuntimeConfig, console: Console, **fields: Any) -> int:
    """Run a job and close its records however it ends; returns the exit code.

    Args:
        output: directory of logs and results.
        runtime: its limits on restarts and stalls.
        fields: the other fields of a `Job`.

    Raises:
        ConfigError: a server that the environment names does not answer.
    """
    check_addresses()
    output.mkdir(parents=True, exist_ok=True)
    # Not in the output directory, which others may write to: what a restarted run reads here says what runs.
    job = Job(directory=Path(tempfile.mkdtemp(prefix="xray-job-")), output=output, subject=subject, **fields)
    write_atomic(job.file, job.model_dump_json())
    # The reaper closes the records if this process is killed.
    tag = start_reaper(*command_to_close(output, job.outputs))
    attempts = _Attempts(job, runtime.stall_timeout_s, console)
    try:
        with attempts.handling_signals():
            for attempt in range(runtime.restarts + 1):
                code = attempts.run()
                kill_tagged(tag)
                if attempts.interrupts:
                    text = f"interrupted; run the same command again to continue from {resume_point(output)}"
                    console.print(text, highlight=False, soft_wrap=True)
                    return INTERRUPTED
                reason = attempts.stalled or _why_lost(job, code)
                if reason is None:
                    return code
                again = f"starting again ({attempt + 1} of {runtime.restarts})"
                if attempt == runtime.restarts:
                    point, logs = resume_point(output), output / "logs"
                    again = f"giving up. Run the same command again to continue from {point}; logs: {logs}"
                console.print(f"the run was lost ({reason}); {again}", style="yellow", highlight=False, soft_wrap=True)
            return FAILED
    finally:
        close_lost_runs([output, *outputs_in(job.outputs)])
        shutil.rmtree(job.directory, ignore_errors=True)
        end_well(tag)


def _why_lost(job: Job, code: int) -> str | None:
    """Why the run was lost; None if it finished or failed by itself."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if job.ended.exists():
        return (job.ended.read_text(encoding="utf-8") or "Ray or Prefect stopped") if code == LOST else None
    # A failed assertion in Ray ends the process with an ordinary exit code and no exception.
    return "Ray or Prefect stopped" if code == LOST else f"its process ended unexpectedly with code {code}"


class _Attempts:
    """Successive processes that run one job."""

    def __init__(self, job: Job, stall_timeout_s: float, console: Console) -> None:
        self.interrupts = 0
        """Number of stop signals so far."""
        self.stalled: str | None = None
        """Why the last attempt was killed, if it hung."""
        self._job, self._stall_timeout_s, self._console = job, stall_timeout_s, console
        self._child: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._forward) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> int:
        """Start an attempt and wait for it; returns its exit code."""
        self._job.ended.unlink(missing_ok=True)
        self._job.heartbeat.touch()
        self.stalled = None
        # In its own process group: Ctrl-C only reaches this process, which forwards it once.
        command = [sys.executable, "-m", "xray.cli.runner", str(self._job.file)]
        # The child inherits the mask: signals wait until its handlers are installed.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        child = self._child = subprocess.Popen(command, process_group=0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self.interrupts:
            child.kill()
        while (code := child.poll()) is None:
            silent = time.time() - self._job.heartbeat.stat().st_mtime
            if silent > self._stall_timeout_s and silent > self._stall_timeout_s * load():
                self.stalled = f"no progress for {silent:.0f} s"
                child.kill()
            time.sleep(POLL_SECONDS)
        return code

    def _forward(self, *_: Any) -> None:
        self.interrupts += 1
        if self._child is None:
            return
        if self.interrupts == 1:
            self._console.print("stopping after the current step, with a snapshot; Ctrl-C again to stop at once")
            self._child.send_signal(signal.SIGINT)
        else:
            self._child.kill()
