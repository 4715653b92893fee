"""The heartbeat of a Workhorse: it lives, and what it is doing."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

from xray_runtime.cluster.types import Heartbeat
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.signs import common_parts_done, parts_done

if TYPE_CHECKING:
    from xray_runtime.cluster.protocols import Ref, WorkhorseHandle

CONCURRENCY_GROUP = "heartbeat"
"""Ray's concurrency group that answers heartbeats."""
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
"""Source files in which a thread waits for other ranks."""


class HeartbeatSource:
    """Makes the heartbeats of this process, which describe the work of `work_thread`."""

    def __init__(self) -> None:
        self.work_thread = threading.get_ident()
        self._collective: FrameType | None = None
        self._since = 0.0
        self._common_parts, self._moved = common_parts_done(), time.monotonic()

    def heartbeat(self) -> Heartbeat:
        frames = sys._current_frames()
        # Backward passes on CUDA, and their communication hooks, run in other threads.
        waiting = [f for f in frames.values() if any(path in f.f_code.co_filename for path in COLLECTIVES)]
        if self._collective is None or self._collective not in waiting:
            # Compare frames, not ids: the next collective may get the same address.
            self._collective, self._since = (waiting[0] if waiting else None), time.monotonic()
        waits_s = time.monotonic() - self._since if self._collective is not None else 0.0
        if self._common_parts != common_parts_done():
            self._common_parts, self._moved = common_parts_done(), time.monotonic()
        code, line = "nothing", 0
        if self.work_thread in frames:
            frame = frames[self.work_thread]
            code, line = f"{frame.f_code.co_qualname} in {frame.f_code.co_filename}", frame.f_lineno
        return Heartbeat(
            host=socket.gethostname(),
            pid=os.getpid(),
            waits_s=waits_s,
            doing=f"{code}:{line}",
            parts=parts_done(),
            common_parts=self._common_parts,
            stands_s=time.monotonic() - self._moved,
            load=load(),
        )


def request_heartbeat(workhorse: WorkhorseHandle) -> Ref[Heartbeat]:
    """Request a heartbeat of a Workhorse, which it answers also while it works."""
    return workhorse.heartbeat.options(concurrency_group=CONCURRENCY_GROUP).remote()
