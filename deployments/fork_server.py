"""Ray's workers on this machine, forked from processes that have imported their libraries.

Ray starts Python for each worker, which imports Ray (1 CPU second), a Workhorse torch, transformers and DeepSpeed (6
more) or vLLM (7), and a stage torch, transformers, Prefect and MLflow. Here a worker is the fork of a process that did
so once, and shares its memory. The servers form a tree, whose branches start when the first worker needs them, the one
with torch when a run begins (`ForkServer.load`):

    first server → each Ray and job, with Ray
                 → torch and transformers, then the first Ray → each kind of libraries
                 → torch and transformers → each kind of libraries → each later Ray and job

Each forks the workers that need no more than it has. Ray reads the variables of its cluster and job once, at import, so
torch loads while Ray's own servers start, and the process that loaded it imports Ray then: an idle one would hold 56
MiB. A process has one Ray as a rule; for later ones other servers import Ray last, once for each kind of libraries but
the stages', which takes more memory, and keep those for the next Ray. Ray starts `fork_client.py` in place of Python.
Android's zygote and `multiprocessing`'s forkserver work in the same way; Ray has no such server.

A server imports and forks and does nothing else: it must not use Ray, CUDA or OpenMP, none of which survives a fork.
It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

from xray.deployments import fork_client
from xray_runtime.cluster.pool.libraries import (
    KEEP_MEMORY,
    NEEDLESS,
    STAGE,
    UNUSED,
    VARIABLE,
    import_libraries,
    import_models,
    prepare_imports,
)
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.gpus import has_driver
from xray_runtime.kernel.hidden_libraries import hidden, show
from xray_runtime.kernel.tracking.registry import store_module

OF_A_RAY = ("RAY_RAYLET_PID", "RAY_JOB_ID")
"""Variables that Ray reads once, at its import."""
RAY, TORCH, TORCH_AGAIN = "ray", "torch", "torch-again"
"""Steps of a request's path: `ray-RAYLET-JOB`; torch with transformers, for the first Ray and for later ones. The
others are named by their libraries."""
WORKERS = "xray_runtime.cluster"
WITH_RAY = ("ray", "ray._private.node", f"{WORKERS}.whole_model", f"{WORKERS}.learner", f"{WORKERS}.generator")
"""Imported together with Ray: the actors of models."""
OF_STAGES = ("xray.flows.own_lifecycle", "xray.tasks.stage_job")
"""Imported for stages, with MLflow's store: what each of them uses."""
POLL_SECONDS = 5.0
OOM_SCORE = "1000"
"""As Ray sets it for its workers, so that the kernel kills them first when memory runs out."""


class ForkServer:
    """The first server, and the command that starts a worker through it."""

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix="xray-fork-")
        self.address = f"{directory}/socket"
        self.command = f"{directory}/python"
        client = [sys.executable, "-I", "-S", fork_client.__file__, self.address, VARIABLE, sys.executable]
        with open(os.open(self.command, os.O_WRONLY | os.O_CREAT, 0o700), "w", encoding="utf-8") as script:
            script.write(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
        # It listens before the server has started, so that clients may ask at once.
        with listen(self.address) as listener:
            # The servers end when their input is closed. No other process holds the pipe, so they end however this one
            # ends.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "xray.deployments.fork_server", self.address, str(listener.fileno())],
                env=KEEP_MEMORY | os.environ,
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def load(self) -> None:
        """Have torch and transformers imported now, for the models that will come. Returns at once."""
        threading.Thread(target=fork_client.start, args=(self.address, "", []), daemon=True).start()


_servers: list[ForkServer] = []


def fork_server() -> ForkServer | None:
    """This process's server, which serves each Ray that the process starts. None on other systems than Linux, and on a
    machine with a GPU, where imports take little of the time that a model takes to start."""
    if sys.platform != "linux" or has_driver():
        return None
    if not _servers or not _servers[-1].is_alive():
        _servers.append(ForkServer())
    return _servers[-1]


@dataclass(frozen=True)
class WorkerRequest:
    """Ray's request for a worker."""

    libraries: str
    arguments: list[str]
    """Empty where no worker is wanted, but a server with torch."""
    environment: dict[str, str]
    cwd: str
    output: list[int]
    """Its standard streams."""

    @property
    def ray(self) -> str:
        return "-".join([RAY, *(self.environment[name] for name in OF_A_RAY)])

    def path(self, first_ray: str) -> tuple[str, ...]:
        """The servers that it passes through after the first, whose first request was of `first_ray`."""
        if not self.arguments:
            return (TORCH_AGAIN if first_ray else TORCH,)
        if not self.libraries:
            return (self.ray,)
        if self.ray == first_ray:
            return TORCH, self.ray, self.libraries
        # The libraries of stages import Ray.
        rest = (self.ray, STAGE) if self.libraries == STAGE else (self.libraries, self.ray)
        return TORCH_AGAIN, *rest

    def close(self) -> None:
        for stream in self.output:
            os.close(stream)


def receive(connection: socket.socket) -> WorkerRequest:
    """Raises OSError, KeyError, TypeError or ValueError if the request is incomplete or malformed."""
    _, output, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as content:
        return WorkerRequest(**json.loads(content.read()), output=output)


def listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(socket.SOMAXCONN)
    return listener


def accept(listener: socket.socket, raylet: int | None) -> socket.socket:
    """The next client. Raises SystemExit when the owner of this server, or its raylet, is gone."""
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        ready.register(sys.stdin, selectors.EVENT_READ)
        while True:
            readable = [key.fileobj for key, _ in ready.select(POLL_SECONDS)]
            if sys.stdin in readable or (raylet is not None and not Path(f"/proc/{raylet}").exists()):
                sys.exit()
            if readable:
                return listener.accept()[0]


def serve(listener: socket.socket, address: str, path: tuple[str, ...] = (), first_ray: str = "") -> WorkerRequest:
    """Fork on request; returns only in the forked workers, each with its request.

    Args:
        path: the steps of `WorkerRequest.path` that this server has imported.
        first_ray: `WorkerRequest.ray` of the first server's first request.
    """
    # Garbage collections would write to memory shared with the forks. No process waits for ended workers.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    raylet = int(os.environ[OF_A_RAY[0]]) if any(step.startswith(RAY) for step in path) else None
    started: set[str] = set()
    while True:
        with accept(listener, raylet) as connection, contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            request = receive(connection)
            if request.arguments:
                first_ray = first_ray or request.ray
            wanted = request.path(first_ray)
            if wanted == path:
                if request.arguments and os.fork() == 0:
                    listener.close()
                    return request
                request.close()
                connection.sendall(fork_client.STARTED)
                continue
            request.close()
            longer = wanted[: len(path) + 1]
            if path == (TORCH,):
                # Only workers of the first Ray come here.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                import_step(longer[-1], request)
                connection.sendall("-".join([address, *path]).encode())
                connection.close()
                return serve(listener, address, longer, first_ray)
            elsewhere = "-".join([address, *longer])
            if elsewhere not in started:
                # It listens before it imports: clients block until the imports finish.
                other = listen(elsewhere)
                started.add(elsewhere)
                if os.fork() == 0:
                    listener.close()
                    connection.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    import_step(longer[-1], request)
                    return serve(other, address, longer, first_ray)
                other.close()
            connection.sendall(elsewhere.encode())


def import_step(name: str, request: WorkerRequest) -> None:
    """Import what comes at this step of the request's path."""
    if name.startswith(RAY):
        os.environ.clear()
        os.environ |= request.environment
        for module in WITH_RAY:
            importlib.import_module(module)
    elif name in (TORCH, TORCH_AGAIN):
        prepare_imports(threads=1)
        import_models()
    elif name == STAGE:
        # It may also use libraries that no Workhorse does, as may a user's reward.
        show(*UNUSED)
        with hidden(*NEEDLESS):
            for module in (store_module(), *OF_STAGES):
                importlib.import_module(module)
    else:
        # vLLM imports Ray, for an executor that nothing here uses, and a server may have to fork before that.
        ray = sys.modules.pop("ray", None)
        sys.modules["ray"] = None  # type: ignore[assignment]
        import_libraries(name, RuntimeConfig(), "cpu")
        del sys.modules["ray"]
        if ray is not None:
            sys.modules["ray"] = ray


def become_worker(request: WorkerRequest) -> None:
    """Run Ray's worker in this process, as if Ray had started it."""
    for name in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)
    os.setpgid(0, 0)
    for number, stream in enumerate(request.output):
        os.dup2(stream, number)
    request.close()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, encoding="ascii")
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ |= request.environment
    sys.argv = request.arguments
    sys.path[0] = str(Path(sys.argv[0]).parent)
    gc.enable()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    runpy.run_path(sys.argv[0], run_name="__main__")


def main(address: str, listener: socket.socket) -> None:
    directory, owner = Path(address).parent, os.getpid()
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    gc.disable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        request = serve(listener, address)
    except BaseException as error:
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)
        if not isinstance(error, SystemExit):
            raise
        # Python would take a second to free what it imported, and the end of a run waits for that.
        os._exit(0)
    become_worker(request)


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
