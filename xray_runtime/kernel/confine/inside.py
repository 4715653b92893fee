"""The first program in a sandbox: `python -I -S inside.py SPEC COMMAND…`; it becomes the command.

With bubblewrap or namespaces the sandbox has a network of its own, whose loopback gets the gateway's port. A process
here asks outside for a connection of each client, by a byte on the descriptor `door`, and is sent a connected socket.
Only this process can use the door: the command does not inherit it, and may not look into processes that are not
dumpable.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import sys
import threading
import time
from typing import Any

PIECE = 65_536
STACK_BYTES = 2**18
PAUSE_S = 0.05
PR_SET_DUMPABLE = 4


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    sys.path.insert(0, spec["root"])
    from xray_runtime.kernel.confine import landlock, namespaces, seccomp

    how = spec["how"]
    has_own_room = how in ("bubblewrap", "namespaces")
    if how == "namespaces":
        namespaces.enter()
        namespaces.start_child()
        namespaces.make_root(*(spec[name] for name in ("new_root", "readable", "devices", "home", "disk_mb")))
        namespaces.start_loopback()
    os.chdir(spec["home"])
    # With root outside, the next program would have all capabilities again.
    namespaces.give_up_rights()
    if spec["files"] is not None:
        shutil.copytree(spec["files"], ".", symlinks=True, dirs_exist_ok=True)
    if has_own_room and spec["port"] is not None:
        _open_port(spec["port"], spec["door"])
    if "processes" in spec:
        resource.setrlimit(resource.RLIMIT_NPROC, (spec["processes"], spec["processes"]))
    if how == "namespaces":
        _attend_child()
    if how == "landlock":
        landlock.restrict(spec["readable"], spec["writable"], spec["port"])
    if spec["filter"]:
        with contextlib.suppress(*(OSError,) if how == "limits" else ()):
            seccomp.install(seccomp.agent_filter(has_own_room))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")


def _attend_child() -> None:
    """Go on in a child; this process, the first of its namespace, ends orphans' traces and ends as the child does."""
    from xray_runtime.kernel.confine import namespaces

    child = os.fork()
    while child:
        pid, status = os.wait()
        if pid == child:
            os._exit(namespaces.exit_code(status))


def _open_port(port: int, door: int) -> None:
    """Start the process that answers at `port`, as a child of the sandbox's first process."""
    listener = socket.create_server(("127.0.0.1", port))
    child = os.fork()
    if child:
        os.close(door)
        listener.close()
        os.waitpid(child, 0)
        return
    if not os.fork():
        try:
            _answer(listener, socket.socket(fileno=door))
        finally:
            os._exit(1)
    os._exit(0)


def _answer(listener: socket.socket, door: socket.socket) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # The end of the program's output is the end of these.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    threading.stack_size(STACK_BYTES)
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # no more descriptors
            time.sleep(PAUSE_S)
            continue
        try:
            door.send(b"?")
            _, [descriptor], _, _ = socket.recv_fds(door, 1, 1)
            gateway = socket.socket(fileno=descriptor)
            for pair in ((client, gateway), (gateway, client)):
                threading.Thread(target=_pass_on, args=pair, daemon=True).start()
        except (OSError, RuntimeError, ValueError):  # no gateway, or no more threads
            client.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
