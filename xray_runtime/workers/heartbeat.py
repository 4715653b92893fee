"""The heartbeat of a Workhorse: that it lives, and what it is doing."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from xray_runtime.cores import load

if TYPE_CHECKING:
    from xray_runtime.workers.protocols import Ref, WorkhorseHandle

CONCURRENCY_GROUP = "heartbeat"
"""Ray's name of the thread that answers heartbeats."""
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
"""Source files in which a thread waits for other ranks."""


@dataclass(frozen=True)
class Heartbeat:
    host: str
    pid: int
    waits_s: float
    """How long it has been waiting in one and the same collective; 0: it is not waiting."""
    doing: str
    """File, line and function where it is."""
    load: float
    """Of its machine (`cores.load`)."""


class HeartbeatSource:
    """Makes the heartbeats of this process; `work_thread` is the thread whose work they describe."""

    def __init__(self) -> None:
        self.work_thread = threading.get_ident()
        self._collective: FrameType | None = None
        self._since = 0.0

    def heartbeat(self) -> Heartbeat:
        frames = sys._current_frames()
        # Backward passes on CUDA, and the hooks that communicate in them, run in threads of their own.
        waiting = [f for f in frames.values() if any(path in f.f_code.co_filename for path in COLLECTIVES)]
        if self._collective is None or self._collective not in waiting:
            # The frame is held, not its id: the next collective may get the same address.
            self._collective, self._since = (waiting[0] if waiting else None), time.monotonic()
        waits_s = time.monotonic() - self._since if self._collective is not None else 0.0
        code, line = "nothing", 0
        if self.work_thread in frames:
            frame = frames[self.work_thread]
            code, line = f"{frame.f_code.co_qualname} in {frame.f_code.co_filename}", frame.f_lineno
        return Heartbeat(socket.gethostname(), os.getpid(), waits_s, f"{code}:{line}", load())


def request_heartbeat(workhorse: WorkhorseHandle) -> Ref[Heartbeat]:
    """Ask a Workhorse for its heartbeat, also while it works."""
    return workhorse.heartbeat.options(concurrency_group=CONCURRENCY_GROUP).remote()
