"""A process that runs agents, each in a forked child: `python -m xray_runtime.agents.worker`.

The protocol is JSON lines. The first line in is {"agent": "module:function" or null, "path": [...], "parent": p}, where
p is the reading end of a pipe of the parent; its answer is {"ready": true} or {"error": why}. Then

    {"id": n, "variables": {...}, "limits": {"timeout_s", "memory_mb", "output_bytes", "processes", "extra_processes"},
     and "task": {...}, or "command": [...], "stdin": text, "directory": path, "gateway": [host, port] or null}
    {"kill": n}

are answered once each: {"id": n, "result": value}, {"id": n, "code": exit code, "output": end of its standard output},
or {"id": n, "broken": why}. A function gets the task as a dictionary. A command is a confined one, with no other
variables than those given; it asks for connections to the gateway at descriptor `DOOR`.

Every descendant of an agent ends with it: orphans become children of this process, which is their subreaper.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xray_runtime.agents.process_tree import SET_DEATH_SIGNAL, SET_SUBREAPER, children, descendants, kill_trees, prctl
from xray_runtime.agents.sandboxes.call import called
from xray_runtime.agents.worker_process import end_with, in_short, take_streams
from xray_runtime.kernel.confine.confine import DOOR
from xray_runtime.rewards.source import described

TICK_S = 0.2
"""How often time and processes are checked."""
TAIL_BYTES = 65_536
"""Size of the end of a command's output in which its result is looked for."""
OPEN_FILES = 1024
"""Limit of each process's open files."""
CONNECT_S = 5.0
USES: tuple[str, ...] = ()

Say = Callable[[dict[str, Any]], None]


@dataclass
class _Run:
    """One agent that runs."""

    id: int
    pid: int
    exited: int
    """pidfd."""
    outputs: dict[int, bytearray]
    """Reading ends of its result and of its log → the end of what was read."""
    result: int
    is_command: bool
    gateway: tuple[str, int] | None
    door: socket.socket | None
    limits: dict[str, Any]
    begun: float = field(default_factory=time.monotonic)
    num_bytes: int = 0
    broken: str | None = None

    def descriptors(self) -> list[int]:
        return [self.exited, *self.outputs, *([] if self.door is None else [self.door.fileno()])]


class _AgentWorker:
    """The agents of this process.

    Args:
        agent: the function; None: agents are commands.
    """

    def __init__(self, agent: Callable[[dict[str, Any]], Any] | None, say: Say) -> None:
        self._agent, self._say = agent, say
        self._runs: dict[int, _Run] = {}
        self._selector = selectors.DefaultSelector()
        self._requests = bytearray()

    def serve(self, requests: int) -> None:
        """Answer requests until their pipe closes."""
        self._selector.register(requests, selectors.EVENT_READ, None)
        checked = time.monotonic()
        while True:
            for key, _ in self._selector.select(TICK_S if self._runs else None):
                run: _Run | None = key.data
                if run is None:
                    if not self._read_requests(requests):
                        return
                elif self._runs.get(run.id) is run:
                    self._take(run, key.fd)
            if self._runs and time.monotonic() - checked > TICK_S:
                checked = time.monotonic()
                self._check_limits()

    def _read_requests(self, requests: int) -> bool:
        content = os.read(requests, 2**20)
        self._requests += content
        *lines, rest = bytes(self._requests).split(b"\n")
        self._requests = bytearray(rest)
        for line in lines:
            request = json.loads(line)
            if "kill" not in request:
                self._start(request)
            elif request["kill"] in self._runs:
                self._break(self._runs[request["kill"]], "it was stopped")
        return bool(content)

    def _start(self, request: dict[str, Any]) -> None:
        results, logs = os.pipe(), os.pipe()
        gateway = request.get("gateway")
        doors = socket.socketpair(type=socket.SOCK_SEQPACKET) if gateway else None
        pid = os.fork()
        if not pid:
            self._selector.close()
            _run_child(self._agent, request, results, logs, doors)
        for _, theirs in (results, logs):
            os.close(theirs)
        if doors is not None:
            doors[1].close()
        outputs, is_command = {results[0]: bytearray(), logs[0]: bytearray()}, "command" in request
        door, limits = doors and doors[0], request["limits"]
        run = _Run(request["id"], pid, os.pidfd_open(pid), outputs, results[0], is_command, gateway, door, limits)
        self._runs[run.id] = run
        for fd in run.descriptors():
            self._selector.register(fd, selectors.EVENT_READ, run)

    def _take(self, run: _Run, fd: int) -> None:
        if fd == run.exited:
            self._finish(run)
            return
        if run.door is not None and run.gateway is not None and fd == run.door.fileno():
            self._connect(run.gateway, run.door)
            return
        content = os.read(fd, TAIL_BYTES)
        if not content:
            self._selector.unregister(fd)
            return
        run.num_bytes += len(content)
        run.outputs[fd] = (run.outputs[fd] + content)[-TAIL_BYTES:]
        if fd != run.result:
            sys.stderr.buffer.write(content)
            sys.stderr.flush()
        if run.num_bytes > run.limits["output_bytes"]:
            self._break(run, f"it wrote more than output_mb = {run.limits['output_bytes'] / 2**20:g}")

    def _connect(self, gateway: tuple[str, int], door: socket.socket) -> None:
        """Send a sandbox a connection to the gateway, or nothing if there is none."""
        with contextlib.suppress(OSError):
            if door.recv(1):
                try:
                    with socket.create_connection(gateway, CONNECT_S) as connection:
                        connection.settimeout(None)
                        socket.send_fds(door, [b"!"], [connection.fileno()])
                except OSError:
                    door.send(b"-")
                return
        self._selector.unregister(door.fileno())

    def _check_limits(self) -> None:
        of_parent = children()
        for run in list(self._runs.values()):
            limits, count = run.limits, 1 + len(list(descendants(of_parent, run.pid)))
            if time.monotonic() - run.begun > limits["timeout_s"]:
                self._break(run, f"it took longer than timeout_s = {limits['timeout_s']:g}")
            elif count > limits["processes"] + limits.get("extra_processes", 0):
                self._break(run, f"it had more than max_processes = {limits['processes']}")

    def _break(self, run: _Run, why: str) -> None:
        run.broken = run.broken or why
        self._finish(run)

    def _finish(self, run: _Run) -> None:
        """End a run's processes and answer."""
        kill_trees([run.pid])
        _, status = os.waitpid(run.pid, 0)
        del self._runs[run.id]
        self._kill_orphans()
        for fd, content in run.outputs.items():
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                while part := os.read(fd, TAIL_BYTES):
                    content += part
        for fd in run.descriptors():
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
        for fd in (run.exited, *run.outputs):
            os.close(fd)
        if run.door is not None:
            run.door.close()
        code = os.waitstatus_to_exitcode(status)
        self._say({"id": run.id} | _answer(run, code))

    def _kill_orphans(self) -> None:
        """Kill children of this process that are no run: the orphans of runs that ended."""
        known = {run.pid for run in self._runs.values()}
        while orphans := [pid for pid in children().get(os.getpid(), []) if pid not in known]:
            kill_trees(orphans)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _answer(run: _Run, code: int) -> dict[str, Any]:
    if run.broken is not None:
        return {"broken": run.broken}
    output = bytes(run.outputs[run.result])
    if run.is_command:
        return {"code": code, "output": output.decode(errors="replace")}
    try:
        answer: dict[str, Any] = json.loads(output)
        return {name: answer[name] for name in ("result", "broken") if name in answer}
    except ValueError:
        return {"broken": f"its process ended with {code}"}


def _run_child(
    agent: Callable[..., Any] | None,
    request: dict[str, Any],
    results: tuple[int, int],
    logs: tuple[int, int],
    doors: tuple[socket.socket, socket.socket] | None,
) -> None:
    """Run the agent in this forked process, which then ends."""
    code = 1
    try:
        os.setsid()
        prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        prctl(SET_SUBREAPER, 1)
        size = request["limits"]["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        os.dup2(logs[1], 2)
        if "command" in request:
            _exec(request, results[1], doors)
        os.environ.update(request["variables"])
        os.dup2(logs[1], 1)
        assert agent is not None
        try:
            answer = {"result": json.loads(called(agent, request["task"]))}
        except BaseException as error:  # SystemExit too
            answer = {"broken": f"it raised {in_short(error)}"}
        with os.fdopen(results[1], "wb") as file:
            file.write(json.dumps(answer).encode())
        code = 0
    except BaseException as error:
        os.write(logs[1], f"{described(error)}\n".encode())
    finally:
        os._exit(code)


def _exec(request: dict[str, Any], stdout: int, doors: tuple[socket.socket, socket.socket] | None) -> None:
    os.chdir(request["directory"])
    with tempfile.TemporaryFile() as stdin:
        stdin.write(request["stdin"].encode())
        stdin.seek(0)
        os.dup2(stdin.fileno(), 0)
    os.dup2(stdout, 1)
    if doors is not None:
        # Last, since the number may be that of a pipe above.
        os.dup2(doors[1].fileno(), DOOR)
    os.execvpe(request["command"][0], request["command"], request["variables"])


def _load(name: str) -> Callable[[dict[str, Any]], Any]:
    """The function at an import path. Raises ValueError if it is not callable."""
    module, _, attribute = name.partition(":")
    function: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise ValueError(f"{name} is {function!r}: must be a function of a task")
    return function


def main() -> None:
    answers, requests = take_streams()

    def say(answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode() + b"\n"
        while content:
            content = content[os.write(answers, content) :]

    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(requests, 1)
    first = json.loads(line)
    end_with(first["parent"])
    os.set_inheritable(first["parent"], False)
    with contextlib.suppress(OSError):
        # Before thousands of processes that an agent may fork; those that it forks itself have the usual priority.
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    sys.path[:] = first["path"]
    prctl(SET_SUBREAPER, 1)
    try:
        agent = None if first["agent"] is None else _load(first["agent"])
    except BaseException as error:  # SystemExit of a module too
        say({"error": in_short(error)})
        return
    say({"ready": True})
    _AgentWorker(agent, say).serve(requests)
    kill_trees(children().get(os.getpid(), []))


if __name__ == "__main__":
    main()
