"""The worker process of a stage's agents, as its parent sees it: started on demand, again after its death."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from xray_runtime.agents import worker
from xray_runtime.agents.worker_process import start_worker
from xray_runtime.kernel.cores import load

log = logging.getLogger(__name__)

Answer = dict[str, Any]

START_S = 120.0
"""Time for the imports of an agent; longer on a busy machine."""


class AgentWorker:
    """Runs agents in forked children of one process. Any thread may call its methods.

    Args:
        agent: "module:function"; None: agents are commands.
        log_path: file for their output.

    Raises:
        RuntimeError: it does not start; names the cause.
    """

    def __init__(self, agent: str | None, log_path: Path) -> None:
        self._agent, self._log_path = agent, log_path
        self._lock, self._ids = threading.Lock(), itertools.count()
        self._is_closed = False
        self._start()

    def run(self, request: dict[str, Any]) -> tuple[int, Future[Answer]]:
        """(number, answer) of a run; `request` and answer are those of `worker` without `id`.

        The answer is {"infrastructure": why} if the process died.
        """
        with self._lock:
            number, answer = next(self._ids), Future[Answer]()
            if self._is_closed:
                answer.set_result({"infrastructure": "the stage ended"})
                return number, answer
            if self._process.poll() is not None:
                log.warning("the agents' process ended with %s; it is restarted", self._process.returncode)
                os.close(self._held)
                self._start()
            self._pending[number] = answer
            self._write({"id": number, **request})
            return number, answer

    def kill(self, number: int) -> None:
        """End a run, if it still runs."""
        with self._lock:
            if number in self._pending:
                self._write({"kill": number})

    def close(self) -> None:
        """End the process with all its agents."""
        with self._lock:
            self._is_closed = True
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._held)
        self._reader.join()

    def _start(self) -> None:
        self._process, self._held, theirs = start_worker(worker.__name__, self._log_path)
        self._pending: dict[int, Future[Answer]] = {}
        self._write({"agent": self._agent, "path": sys.path, "parent": theirs})
        limit = START_S * load()
        overdue = threading.Timer(limit, self._process.kill)
        overdue.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        overdue.cancel()
        answer = json.loads(line) if line else {"error": f"its process ended, or was not ready within {limit:.0f} s"}
        if "error" in answer:
            self._process.kill()
            self._process.wait()
            raise RuntimeError(f"the agent {self._agent} cannot start: {answer['error']}")
        self._reader = threading.Thread(target=self._read, args=(self._process, self._pending), daemon=True)
        self._reader.start()

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it died; its reader fails what is pending
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes], pending: dict[int, Future[Answer]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = pending.pop(answer.pop("id"))
            future.set_result(answer)
        process.wait()
        with self._lock:
            rest = list(pending.values())
            pending.clear()
        for future in rest:
            future.set_result({"infrastructure": "the agents' process died"})
