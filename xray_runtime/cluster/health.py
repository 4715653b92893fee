"""Health of the Workhorses of one model: detect failures, and find the rank that failed first.

Three kinds of failures are detected in different ways:

    a process dies                      Ray reports it at once
    a process hangs                     no heartbeat for `runtime.hang_timeout_s`; a working process still answers
    a rank does not join a collective   it stands for `runtime.collective_timeout_s` while its peers have done more of
                                        what all ranks do (`signs`), or wait in a collective for so long; at the latest
                                        torch gives up (30 min)

NCCL's calls return at once, so on CUDA the line that a rank executes says little, and what it has done counts first.
Both time limits grow with the machine's load. The death of one rank breaks its peers' collectives, often before Ray
reports the death. So after the first failure the others get a moment to fail too, and the cause is reported.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError

from xray_runtime.cluster.heartbeat import request_heartbeat
from xray_runtime.cluster.protocols import Ref, WorkhorseHandle, get
from xray_runtime.cluster.types import Heartbeat
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.errors import root_cause

HEARTBEAT_SECONDS = 2.0
"""Interval between heartbeats while a call runs."""
GATHER_SECONDS = 0.05
"""Time in which answers are taken together. A round for every answer would look at all others each time, which is
quadratic in the number of ranks."""
AFTERMATH_SECONDS = 3.0
"""Time for other ranks to fail too."""
LOG_TAIL_LINES = 15
T = TypeVar("T")
IN_COLLECTIVE = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out waiting")
IN_COLLECTIVE_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


class WorkhorseError(RuntimeError):
    """A Workhorse died, hangs or did not join a collective; names rank and host, and quotes the end of its log."""


class _CollectiveTimeoutError(Exception):
    """A rank waited too long for its peers in a collective."""


class HealthMonitor:
    """Monitors the Workhorses of one model.

    Args:
        workhorses: in order of rank.
        hang_timeout_s: a rank without a heartbeat for so long hangs.
        collective_timeout_s: longest wait in one collective.
        alive: called when heartbeats show that ranks have done parts of their work; gets their number.
    """

    def __init__(
        self,
        role: str,
        workhorses: list[WorkhorseHandle],
        log_dir: Path,
        hang_timeout_s: float,
        collective_timeout_s: float,
        alive: Callable[[int], None] = lambda parts: None,
    ) -> None:
        self._role, self._workhorses, self._log_dir = role, workhorses, log_dir
        self._hang_timeout_s, self._collective_timeout_s = hang_timeout_s, collective_timeout_s
        self._alive = alive
        self._heartbeats: dict[int, Heartbeat] = {}
        """Rank → its last heartbeat."""

    def begin(self) -> None:
        """Get the first heartbeats; the Workhorses must be up."""
        self._heartbeats = dict(enumerate(self.collect([request_heartbeat(w) for w in self._workhorses])))

    def collect(self, refs: list[Ref[T]], ranks: list[int] | None = None) -> list[T]:
        """The answers of calls to `ranks` (default: all, from 0 on).

        Raises:
            WorkhorseError: a process died, hangs, or did not join a collective.
            Exception: an exception of a rank, with a note on rank, host and log.
        """
        waiting = dict(zip(refs, range(len(refs)) if ranks is None else ranks, strict=True))
        answers: dict[Ref[T], T] = {}
        failures: dict[int, Exception] = {}
        pending: dict[int, tuple[Ref[Heartbeat], float]] = {}
        polled = time.monotonic()
        while waiting and not failures:
            failures |= _gather(waiting, answers, HEARTBEAT_SECONDS)
            # By time: a round for every answer would make heartbeats quadratic in the number of ranks.
            if time.monotonic() - polled >= HEARTBEAT_SECONDS:
                polled = time.monotonic()
                failures |= self._poll(pending, set(waiting.values()))
        if not failures:
            return [answers[ref] for ref in refs]
        deadline = time.monotonic() + AFTERMATH_SECONDS
        while waiting and len(refs) > 1 and time.monotonic() < deadline:
            failures |= _gather(waiting, answers, max(deadline - time.monotonic(), 0.0))
        rank = min(failures, key=lambda r: _consequence(failures[r]))
        raise self._explained(rank, failures[rank], sorted(set(waiting.values()) - failures.keys()))

    def _poll(self, pending: dict[int, tuple[Ref[Heartbeat], float]], ranks: set[int]) -> dict[int, Exception]:
        """The ranks that hang or wait too long. `pending`: rank → (pending heartbeat, time of the request)."""
        failures: dict[int, Exception] = {}
        parts = 0
        for rank in ranks:
            ref, since = pending.get(rank, (None, 0.0))
            if ref is not None and not ray.wait([ref], timeout=0)[0]:
                limit = self._hang_timeout_s * self._load(rank)
                if time.monotonic() - since > limit:
                    failures[rank] = WorkhorseError(f"sent no heartbeat for {limit:.0f} s")
                continue
            # If a heartbeat fails, the current call fails too, with the reason.
            with contextlib.suppress(RayError):
                if ref is not None:
                    before, self._heartbeats[rank] = self._heartbeats.get(rank), get(ref)
                    parts += self._heartbeats[rank].parts - (before.parts if before is not None else 0)
            pending[rank] = (request_heartbeat(self._workhorses[rank]), time.monotonic())
        if parts > 0:
            self._alive(parts)
        at = {rank: self._heartbeats[rank] for rank in ranks if rank in self._heartbeats}
        # All ranks wait for the slowest machine.
        limit = self._collective_timeout_s * max(map(self._load, range(len(self._workhorses))), default=1.0)
        behind = ranks_behind(at, limit)
        waiting = at.keys() - behind if behind else {rank for rank, signs in at.items() if signs.waits_s}
        if not failures and (behind or max((signs.waits_s for signs in at.values()), default=0.0) > limit):
            error = _CollectiveTimeoutError(f"given up after {limit:.0f} s")
            failures = dict.fromkeys(waiting, error)
        return failures

    def _explained(self, rank: int, error: Exception, silent: list[int]) -> Exception:
        if isinstance(error, RayTaskError) and _consequence(error) < 2:
            cause = root_cause(error)
            cause.add_note(f"in {self._name(rank)}\n{self._log_tail(rank)}")
            return error
        if _consequence(error) == 2:
            doing = {rank: at.doing for rank, at in self._heartbeats.items()}
            places = (f"{self._name(r)}, which is at {doing.get(r, 'an unknown line')}" for r in silent)
            missing = " and ".join(places) or "another rank"
            done = ", ".join(f"rank {r} {at.common_parts}" for r, at in sorted(self._heartbeats.items()))
            text = f"{self._name(rank)} waited too long in a collective for {missing}: {root_cause(error)}"
            text += f"; parts of the common work that were done: {done}"
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
        """Load of a rank's machine: in its last heartbeat, or now if that is this machine."""
        at = self._heartbeats.get(rank)
        here = at is None or at.host == socket.gethostname()
        return max(at.load if at is not None else 1.0, load() if here else 1.0)

    def _log_tail(self, rank: int) -> str:
        path = self._log_dir / f"{self._role}-{rank}.log"
        if not path.exists():
            return f"{path} does not exist, or is on another node"
        return "\n".join([f"last lines of {path}:", *path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]])


def ranks_behind(at: Mapping[int, Heartbeat], limit_s: float) -> set[int]:
    """The ranks that have done less of the common work than others, and none of it for `limit_s`."""
    most = max((signs.common_parts for signs in at.values()), default=0)
    return {rank for rank, signs in at.items() if signs.common_parts < most and signs.stands_s > limit_s}


def _gather(waiting: dict[Ref[T], int], answers: dict[Ref[T], T], timeout_s: float) -> dict[int, Exception]:
    """Wait for one of the calls, and move those that have ended a moment later from `waiting` to `answers`; returns
    rank → its exception."""
    failures: dict[int, Exception] = {}
    ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
    for ref in ray.wait(list(waiting), num_returns=len(waiting), timeout=min(timeout_s, GATHER_SECONDS))[0]:
        rank = waiting.pop(ref)
        try:
            answers[ref] = ray.get(ref, timeout=0)
        except GetTimeoutError:
            waiting[ref] = rank
        except Exception as error:
            failures[rank] = error
    return failures


def _consequence(error: Exception) -> int:
    """0: the process died or hangs; 1: it raised; 2: its collective broke, perhaps because a peer died."""
    if isinstance(error, _CollectiveTimeoutError):
        return 2
    if isinstance(error, WorkhorseError) or (isinstance(error, RayError) and not isinstance(error, RayTaskError)):
        return 0
    cause = root_cause(error)
    if type(cause).__name__ in IN_COLLECTIVE_TYPES:
        return 2
    return 2 if isinstance(cause, RuntimeError) and any(w in str(cause).lower() for w in IN_COLLECTIVE) else 1


def _reason(error: Exception) -> str:
    """Ray's explanation without ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if "exit detail" in line.lower() or "because" in line), " ".join(lines[:3]))
    return reason.partition(" Some common causes")[0]
