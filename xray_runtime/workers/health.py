"""Watching over the Workhorses of one model while they work, and finding out who failed first.

Three things may go wrong, each noticed in its own way:

    a process dies            Ray says so, at once
    a process stands still    no heartbeat for `runtime.hang_timeout_s`; a busy process answers too
    a rank does not come      to a collective: its peers wait there for `runtime.collective_timeout_s`. (The groups that
                              DeepSpeed makes have torch's own limits: half an hour on gloo, ten minutes on NCCL.)

The death of one rank breaks its peers' collectives, often before Ray has noticed the death. So after the first failure
the others have a moment to fail too, and what cannot be a consequence is reported.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError

from xray_runtime.errors import root_cause
from xray_runtime.workers.heartbeat import Heartbeat
from xray_runtime.workers.pool import heartbeat

HEARTBEAT_SECONDS = 2.0
"""How often heartbeats are polled while a call runs."""
AFTERMATH_SECONDS = 3.0
"""How long the others have to fail too."""
LOG_TAIL_LINES = 15
IN_COLLECTIVE = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out waiting")
IN_COLLECTIVE_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


class WorkhorseError(RuntimeError):
    """A Workhorse died, stands still or did not come to a collective; names rank and host, carries the log's end."""


class _InVainError(Exception):
    """A rank waits in a collective, but not for ever."""


class HealthMonitor:
    """Over the Workhorses of one model.

    Args:
        workhorses: in order of rank.
        hang_timeout_s: who gives no sign of life for so long stands still.
        collective_timeout_s: who waits for others in one collective for longer waits in vain.
    """

    def __init__(
        self, role: str, workhorses: list[Any], log_dir: Path, hang_timeout_s: float, collective_timeout_s: float
    ) -> None:
        self._role, self._workhorses, self._log_dir = role, workhorses, log_dir
        self._hang_timeout_s, self._collective_timeout_s = hang_timeout_s, collective_timeout_s
        self._heartbeats: dict[int, Heartbeat] = {}
        """The last ones seen."""

    def begin(self) -> None:
        """Learn where the Workhorses live; they must be up."""
        self._heartbeats = dict(enumerate(self.collect([heartbeat(w) for w in self._workhorses])))

    def collect(self, refs: list[Any], ranks: list[int] | None = None) -> list[Any]:
        """The answers behind `refs`, one each of `ranks` (default: from 0 on).

        Raises:
            WorkhorseError: a process died, stands still, or did not come to a collective.
            Exception: what a rank raised, as it is, with a note on rank, host and log.
        """
        waiting = dict(zip(refs, range(len(refs)) if ranks is None else ranks, strict=True))
        failures: dict[int, Exception] = {}
        asked: dict[int, tuple[Any, float]] = {}
        while waiting and not failures:
            failures |= _gather(waiting, HEARTBEAT_SECONDS)
            failures |= self._poll(asked, set(waiting.values()))
        if not failures:
            answers: list[Any] = ray.get(refs)
            return answers
        deadline = time.monotonic() + AFTERMATH_SECONDS
        while waiting and len(refs) > 1 and time.monotonic() < deadline:
            failures |= _gather(waiting, max(deadline - time.monotonic(), 0.0))
        rank = min(failures, key=lambda r: _consequence(failures[r]))
        raise self._explained(rank, failures[rank], sorted(set(waiting.values()) - failures.keys()))

    def _poll(self, asked: dict[int, tuple[Any, float]], ranks: set[int]) -> dict[int, Exception]:
        """Poll heartbeats; the ranks that hang or wait in vain. `asked`: rank → (heartbeat, since when)."""
        failures: dict[int, Exception] = {}
        for rank in ranks:
            ref, since = asked.get(rank, (None, 0.0))
            if ref is not None and not ray.wait([ref], timeout=0)[0]:
                if time.monotonic() - since > self._hang_timeout_s:
                    failures[rank] = WorkhorseError(f"gave no sign of life for {self._hang_timeout_s:g} s")
                continue
            # A heartbeat that fails is no news: the call at hand fails too, and says why.
            with contextlib.suppress(RayError):
                if ref is not None:
                    self._heartbeats[rank] = ray.get(ref)
            asked[rank] = (heartbeat(self._workhorses[rank]), time.monotonic())
        waits = {rank: self._heartbeats[rank].waits_s for rank in ranks if rank in self._heartbeats}
        if not failures and max(waits.values(), default=0.0) > self._collective_timeout_s:
            error = _InVainError(f"given up after {self._collective_timeout_s:g} s")
            failures = {rank: error for rank, seconds in waits.items() if seconds}
        return failures

    def _explained(self, rank: int, error: Exception, silent: list[int]) -> Exception:
        if isinstance(error, RayTaskError) and _consequence(error) < 2:
            cause = root_cause(error)
            cause.add_note(f"in {self._name(rank)}\n{self._log_tail(rank)}")
            return error
        if _consequence(error) == 2:
            missing = " and ".join(f"{self._name(r)}, which is at {self._doing(r)}" for r in silent) or "another rank"
            text = f"{self._name(rank)} waited in vain in a collective for {missing}: {root_cause(error)}"
            return WorkhorseError("\n".join([text, *(self._log_tail(r) for r in silent or [rank])]))
        if isinstance(error, WorkhorseError):
            return WorkhorseError(f"{self._name(rank)} {error}\n{self._log_tail(rank)}")
        fate = "ran out of memory" if isinstance(error, OutOfMemoryError) else "died"
        return WorkhorseError(f"{self._name(rank)} {fate}: {_reason(error)}\n{self._log_tail(rank)}")

    def _name(self, rank: int) -> str:
        at = self._heartbeats.get(rank)
        place = f" ({at.host}, pid {at.pid})" if at is not None else ""
        return f"Workhorse {rank} of {len(self._workhorses)} of {self._role!r}{place}"

    def _doing(self, rank: int) -> str:
        return self._heartbeats[rank].doing if rank in self._heartbeats else "an unknown place"

    def _log_tail(self, rank: int) -> str:
        path = self._log_dir / f"{self._role}-{rank}.log"
        if not path.exists():
            return f"{path} was not begun, or lies on another node"
        return "\n".join([f"last lines of {path}:", *path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]])


def _gather(waiting: dict[Any, int], timeout_s: float) -> dict[int, Exception]:
    """Wait for one of the calls and take those that are done out of `waiting`; rank → what it failed with."""
    failures: dict[int, Exception] = {}
    ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
    for ref in ray.wait(list(waiting), num_returns=len(waiting), timeout=0)[0]:
        rank = waiting.pop(ref)
        try:
            ray.get(ref, timeout=0)
        except GetTimeoutError:
            waiting[ref] = rank
        except Exception as error:
            failures[rank] = error
    return failures


def _consequence(error: Exception) -> int:
    """0: a process ended or stands still; 1: it raised; 2: a collective of its broke, which is what peers' ends do."""
    if isinstance(error, _InVainError):
        return 2
    if isinstance(error, WorkhorseError) or (isinstance(error, RayError) and not isinstance(error, RayTaskError)):
        return 0
    cause = root_cause(error)
    if type(cause).__name__ in IN_COLLECTIVE_TYPES:
        return 2
    return 2 if isinstance(cause, RuntimeError) and any(w in str(cause).lower() for w in IN_COLLECTIVE) else 1


def _reason(error: Exception) -> str:
    """Ray's own words, without the ids it puts before them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if "exit detail" in line.lower() or "because" in line), " ".join(lines[:3]))
    return reason.partition(" Some common causes")[0]
