"""A Workhorse's sign of life, and what it is doing meanwhile."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
"""Where a thread stands that waits for other ranks."""


@dataclass(frozen=True)
class Heartbeat:
    host: str
    pid: int
    waits_s: float
    """How long it has been waiting in one and the same collective; 0: it is not."""
    doing: str
    """File, line and function where its work stands."""


class HeartbeatSource:
    """Gives the heartbeat of this process; `work_thread` is the one whose work is looked at."""

    def __init__(self) -> None:
        self.work_thread = threading.get_ident()
        self._collective: FrameType | None = None
        self._since = 0.0

    def heartbeat(self) -> Heartbeat:
        frames = sys._current_frames()
        # Backward passes on CUDA, and the hooks that communicate in them, run in threads of their own.
        waiting = [f for f in frames.values() if any(place in f.f_code.co_filename for place in COLLECTIVES)]
        if self._collective is None or self._collective not in waiting:
            # The frame is held, not its id: the next collective may get the same address.
            self._collective, self._since = (waiting[0] if waiting else None), time.monotonic()
        waits_s = time.monotonic() - self._since if self._collective is not None else 0.0
        code, line = "nothing", 0
        if self.work_thread in frames:
            frame = frames[self.work_thread]
            code, line = f"{frame.f_code.co_qualname} in {frame.f_code.co_filename}", frame.f_lineno
        return Heartbeat(socket.gethostname(), os.getpid(), waits_s, f"{code}:{line}")
