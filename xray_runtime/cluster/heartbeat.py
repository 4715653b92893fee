"""The heartbeat of a Workhorse: it lives, and what it is doing."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from xray_runtime.cluster.types import Heartbeat
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.signs import common_parts_done, parts_done

if TYPE_CHECKING:
    from xray_runtime.cluster.protocols import Ref, WorkhorseHandle

CONCURRENCY_GROUP = "heartbeat"
"""Ray's concurrency group that answers heartbeats."""
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
"""Source files in which a thread waits for other ranks."""

Mark: TypeAlias = Callable[[FrameType, str, object], None]


class HeartbeatSource:
    """Makes the heartbeats of this process, which describe the work of `work_thread`."""

    def __init__(self) -> None:
        self.work_thread = threading.get_ident()
        self._mark: Mark | None = None
        """In the frame of the collective that a thread has waited in since `_since`. A reference to the frame would
        keep the local variables of all its callers, activations among them, after they have returned."""
        self._since = 0.0
        self._common_parts, self._moved = common_parts_done(), time.monotonic()

    def heartbeat(self) -> Heartbeat:
        doing = self._look()
        waits_s = time.monotonic() - self._since if self._mark is not None else 0.0
        if self._common_parts != common_parts_done():
            self._common_parts, self._moved = common_parts_done(), time.monotonic()
        return Heartbeat(
            host=socket.gethostname(),
            pid=os.getpid(),
            waits_s=waits_s,
            doing=doing,
            parts=parts_done(),
            common_parts=self._common_parts,
            stands_s=time.monotonic() - self._moved,
            load=load(),
        )

    def _look(self) -> str:
        """Note the collective that a thread waits in; returns where the work thread is."""
        frames = sys._current_frames()
        # This frame would refer to itself, and to all others until a garbage collection.
        del frames[threading.get_ident()]
        # Backward passes on CUDA, and their communication hooks, run in other threads.
        waiting = [f for f in frames.values() if any(path in f.f_code.co_filename for path in COLLECTIVES)]
        if self._mark is None or all(frame.f_trace is not self._mark for frame in waiting):
            self._mark, self._since = (_put_mark(waiting[0]) if waiting else None), time.monotonic()
        if self.work_thread not in frames:
            return "nothing:0"
        work = frames[self.work_thread]
        return f"{work.f_code.co_qualname} in {work.f_code.co_filename}:{work.f_lineno}"


def _put_mark(frame: FrameType) -> Mark:
    """Mark `frame` for as long as it runs, by a trace function: only a debugger would call it."""

    def mark(_frame: FrameType, _event: str, _arg: object) -> None:
        pass

    if frame.f_trace is None:
        frame.f_trace = mark
    return mark


def request_heartbeat(workhorse: WorkhorseHandle) -> Ref[Heartbeat]:
    """Request a heartbeat of a Workhorse, which it answers also while it works."""
    return workhorse.heartbeat.options(concurrency_group=CONCURRENCY_GROUP).remote()
