"""Processes and their output: redirects output, and ends all processes of a run with it.

`start_reaper()` starts a small process. All processes that the run starts inherit a unique process tag in their
environment; when the run ends, also by SIGKILL, the reaper ends every process with the tag. It never uses names.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

TAG = "XRAY_RUN_TAG"
"""Environment variable for the process tag."""
GRACE_SECONDS = 3.0
MANY_OBJECTS = 50_000
"""That a collection looks at: some 50 ms."""
LOW_PRIORITY = 10
"""With this niceness, a thread gets about a tenth of the time of others on a busy core."""

QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Prefect does not retry this call: a stage that begins while the server restarts would fail.
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's default is 15, with which its workers would starve on a busy machine; `runtime.niceness` sets it instead.
    "RAY_worker_niceness": "0",
    # Ray serves metrics on every interface without a login.
    "RAY_enable_metrics_collection": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}


def at_low_priority(work: Callable[[], None]) -> None:
    """Run `work` in a thread with the lowest priority, and wait for it."""

    def run() -> None:
        # On Linux each thread has its own priority, and a process cannot raise its priority again.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        work()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector of this process off while the context lasts.

    Imports of large libraries make many objects and hardly any garbage, but the collector looks at all of them each
    time: a fifth of the CPU time of importing vLLM or DeepSpeed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def return_freed_memory() -> None:
    """Return to the system what nothing refers to, and what libraries keep: of a trained model all of it."""
    gc.collect()
    if arrow := sys.modules.get("pyarrow"):
        arrow.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def spare_imports() -> None:
    """Leave what this process has imported since the last call out of later collections, each of which looks at it.

    Does nothing unless that is much: what lives now and is garbage later, in a ring, stays.
    """
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


def return_pages(address: int, num_bytes: int) -> None:
    """Return the whole pages of memory whose content nobody needs: they are zeros when they are used again."""
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def on_sigterm(interrupt: Callable[[], None]) -> Callable[[], object]:
    """Call `interrupt` when this process is asked to end (its node is drained, say); returns what undoes this. Does
    nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.signal(signal.SIGTERM, lambda *_: interrupt())
    return lambda: signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def tighten_umask() -> None:
    """Let only the owner write to files that this process and its children create from now on.

    The umask of a service or a container may be 0, and MLflow's and Prefect's databases have no mode of their own.
    """
    os.umask(os.umask(0o077) | 0o022)


def redirect_output(path: Path) -> None:
    """Redirect this process's output, also from C code, to the end of the file `path`."""
    # A worker of a Ray that somebody else started has that one's umask.
    tighten_umask()
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def start_reaper(*afterwards: str) -> str:
    """Tag this process's future descendants, and end them when this process ends; returns the tag.

    Call it before anything else is started.

    Args:
        afterwards: a command to run after they have ended.
    """
    tag = uuid.uuid4().hex
    os.environ[TAG] = tag
    reader, writer = os.pipe()
    # The write end closes exactly when this process ends: programs do not inherit Python's pipes, and forks close
    # theirs. The reaper inherits the signal mask, so that no signal reaches it before its own handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        subprocess.Popen(
            [sys.executable, "-m", "xray_runtime.kernel.processes", tag, str(reader), *afterwards],
            pass_fds=[reader],
            env={k: v for k, v in os.environ.items() if k != TAG},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(reader)
    os.register_at_fork(after_in_child=lambda: os.close(writer))
    _writers[tag] = writer
    return tag


_writers: dict[str, int] = {}
"""Process tag → write end of its reaper's pipe."""


def end_well(tag: str) -> None:
    """Make the reaper end the tagged processes now, without running the command afterwards."""
    os.write(_writers[tag], b"-")


def tagged(tag: str) -> list[psutil.Process]:
    """All processes with `tag` except this one."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(TAG) == tag:
                processes.append(process)
    return processes


def kill_tagged(tag: str, grace_s: float = GRACE_SECONDS) -> None:
    """End every process with `tag`, like `kill`."""
    kill(lambda: tagged(tag), grace_s)


def kill(find: Callable[[], list[psutil.Process]], grace_s: float) -> None:
    """Send SIGTERM to the processes that `find` returns, and SIGKILL to those it still returns after `grace_s`."""
    deadline = time.monotonic() + grace_s
    for process in find():
        with contextlib.suppress(psutil.Error):
            process.terminate()
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.1)
    # A process may start another between two calls of `find`: repeat until none is left.
    for _ in range(50):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        left = find()
        if not left:
            return
        time.sleep(0.1)


def _reap(tag: str, reader: int, *afterwards: str) -> None:
    is_well = os.read(reader, 1)
    kill_tagged(tag)
    if afterwards and not is_well:
        os.execv(afterwards[0], afterwards)


if __name__ == "__main__":
    _reap(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
