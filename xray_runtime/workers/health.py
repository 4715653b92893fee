"""Health of the Workhorses of one model while they work: noticing failures, and finding out which rank failed first.

Three things may go wrong, each noticed in its own way:

    a process dies                      Ray reports it at once
    a process hangs                     no heartbeat for `runtime.hang_timeout_s`; a busy process answers heartbeats, if
                                        later on a busy machine: this limit and the next grow with the machine's load
    a rank does not join a collective   its peers wait there for `runtime.collective_timeout_s`. (The groups that
                                        DeepSpeed makes have torch's own limits: half an hour on gloo, ten minutes on
                                        NCCL.)

The death of one rank breaks its peers' collectives, often before Ray has noticed the death. So after the first failure
the others have a moment to fail too, and what cannot be a consequence is reported.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import TypeVar

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError

from xray_runtime.cores import load
from xray_runtime.errors import root_cause
from xray_runtime.workers.heartbeat import Heartbeat, request_heartbeat
from xray_runtime.workers.protocols import Ref, WorkhorseHandle, get

HEARTBEAT_SECONDS = 2.0
"""How often heartbeats are polled while a call runs."""
AFTERMATH_SECONDS = 3.0
"""How long the others have to fail too."""
LOG_TAIL_LINES = 15
T = TypeVar("T")
IN_COLLECTIVE = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out waiting")
IN_COLLECTIVE_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


class WorkhorseError(RuntimeError):
    """A Workhorse died, hangs or did not join a collective; names rank and host, and shows the end of its log."""


class _CollectiveTimeoutError(Exception):
    """A rank has waited for its peers in one collective for too long."""


class HealthMonitor:
    """Monitors the Workhorses of one model.

    Args:
        workhorses: in order of rank.
        hang_timeout_s: a rank without a heartbeat for so long hangs.
        collective_timeout_s: a rank that waits in one collective for longer is given up.
    """

    def __init__(
        self,
        role: str,
        workhorses: list[WorkhorseHandle],
        log_dir: Path,
        hang_timeout_s: float,
        collective_timeout_s: float,
    ) -> None:
        self._role, self._workhorses, self._log_dir = role, workhorses, log_dir
        self._hang_timeout_s, self._collective_timeout_s = hang_timeout_s, collective_timeout_s
        self._heartbeats: dict[int, Heartbeat] = {}
        """The last ones seen."""

    def begin(self) -> None:
        """Learn where the Workhorses run; they must be up."""
        self._heartbeats = dict(enumerate(self.collect([request_heartbeat(w) for w in self._workhorses])))

    def collect(self, refs: list[Ref[T]], ranks: list[int] | None = None) -> list[T]:
        """The answers behind `refs`, one each of `ranks` (default: from 0 on).

        Raises:
            WorkhorseError: a process died, hangs, or did not join a collective.
            Exception: what a rank raised, as it is, with a note on rank, host and log.
        """
        waiting = dict(zip(refs, range(len(refs)) if ranks is None else ranks, strict=True))
        failures: dict[int, Exception] = {}
        asked: dict[int, tuple[Ref[Heartbeat], float]] = {}
        while waiting and not failures:
            failures |= _gather(waiting, HEARTBEAT_SECONDS)
            failures |= self._poll(asked, set(waiting.values()))
        if not failures:
            answers: list[T] = ray.get(refs)
            return answers
        deadline = time.monotonic() + AFTERMATH_SECONDS
        while waiting and len(refs) > 1 and time.monotonic() < deadline:
            failures |= _gather(waiting, max(deadline - time.monotonic(), 0.0))
        rank = min(failures, key=lambda r: _consequence(failures[r]))
        raise self._explained(rank, failures[rank], sorted(set(waiting.values()) - failures.keys()))

    def _poll(self, asked: dict[int, tuple[Ref[Heartbeat], float]], ranks: set[int]) -> dict[int, Exception]:
        """The ranks that hang or have waited too long. `asked`: rank → (heartbeat asked for, since when)."""
        failures: dict[int, Exception] = {}
        for rank in ranks:
            ref, since = asked.get(rank, (None, 0.0))
            if ref is not None and not ray.wait([ref], timeout=0)[0]:
                limit = self._hang_timeout_s * self._load(rank)
                if time.monotonic() - since > limit:
                    failures[rank] = WorkhorseError(f"gave no sign of life for {limit:.0f} s")
                continue
            # Where a heartbeat fails, the call at hand fails too, and says why.
            with contextlib.suppress(RayError):
                if ref is not None:
                    self._heartbeats[rank] = get(ref)
            asked[rank] = (request_heartbeat(self._workhorses[rank]), time.monotonic())
        waits = {rank: self._heartbeats[rank].waits_s for rank in ranks if rank in self._heartbeats}
        # The slowest machine is the one that is waited for.
        limit = self._collective_timeout_s * max(map(self._load, range(len(self._workhorses))), default=1.0)
        if not failures and max(waits.values(), default=0.0) > limit:
            error = _CollectiveTimeoutError(f"given up after {limit:.0f} s")
            failures = {rank: error for rank, seconds in waits.items() if seconds}
        return failures

    def _explained(self, rank: int, error: Exception, silent: list[int]) -> Exception:
        if isinstance(error, RayTaskError) and _consequence(error) < 2:
            cause = root_cause(error)
            cause.add_note(f"in {self._name(rank)}\n{self._log_tail(rank)}")
            return error
        if _consequence(error) == 2:
            missing = " and ".join(f"{self._name(r)}, which is at {self._doing(r)}" for r in silent) or "another rank"
            text = f"{self._name(rank)} waited too long in a collective for {missing}: {root_cause(error)}"
            return WorkhorseError("\n".join([text, *(self._log_tail(r) for r in silent or [rank])]))
        if isinstance(error, WorkhorseError):
            return WorkhorseError(f"{self._name(rank)} {error}\n{self._log_tail(rank)}")
        end = "ran out of memory" if isinstance(error, OutOfMemoryError) else "died"
        return WorkhorseError(f"{self._name(rank)} {end}: {_reason(error)}\n{self._log_tail(rank)}")

    def _name(self, rank: int) -> str:
        at = self._heartbeats.get(rank)
        process = f" ({at.host}, pid {at.pid})" if at is not None else ""
        return f"Workhorse {rank} of {len(self._workhorses)} of {self._role!r}{process}"

    def _load(self, rank: int) -> float:
        """Of the machine of a rank: as it said last, or by now as this one is."""
        at = self._heartbeats.get(rank)
        here = at is None or at.host == socket.gethostname()
        return max(at.load if at is not None else 1.0, load() if here else 1.0)

    def _doing(self, rank: int) -> str:
        return self._heartbeats[rank].doing if rank in self._heartbeats else "an unknown line"

    def _log_tail(self, rank: int) -> str:
        path = self._log_dir / f"{self._role}-{rank}.log"
        if not path.exists():
            return f"{path} does not exist, or is on another node"
        return "\n".join([f"last lines of {path}:", *path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]])


def _gather(waiting: dict[Ref[T], int], timeout_s: float) -> dict[int, Exception]:
    """Wait for one of the calls and remove those that are done from `waiting`; rank → what it failed with."""
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
    """0: a process died or hangs; 1: it raised; 2: its collective broke, which the death of a peer causes."""
    if isinstance(error, _CollectiveTimeoutError):
        return 2
    if isinstance(error, WorkhorseError) or (isinstance(error, RayError) and not isinstance(error, RayTaskError)):
        return 0
    cause = root_cause(error)
    if type(cause).__name__ in IN_COLLECTIVE_TYPES:
        return 2
    return 2 if isinstance(cause, RuntimeError) and any(w in str(cause).lower() for w in IN_COLLECTIVE) else 1


def _reason(error: Exception) -> str:
    """Ray's own explanation, without the ids in front of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if "exit detail" in line.lower() or "because" in line), " ".join(lines[:3]))
    return reason.partition(" Some common causes")[0]
