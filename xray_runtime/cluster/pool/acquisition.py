"""Acquire all Workhorses of a stage, at once or not at all.

A stage that needs more than the cluster has is refused. It waits up to `runtime.wait_timeout_s` for resources that
others hold or that a lost node had, and without a limit for other stages of the same run. An attempt that cannot get
everything releases what it got before the next stage has its turn, so no stage holds resources while it waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from xray_runtime.cluster.heartbeat import request_heartbeat
from xray_runtime.cluster.pool.demand import Demand, check, total
from xray_runtime.cluster.pool.groups import are_ready, holders_text, plan_groups, request_group
from xray_runtime.cluster.pool.nodes import await_answers, nodes, num_lost
from xray_runtime.cluster.pool.pool import evict_idle_workers, find_worker_pool, start
from xray_runtime.cluster.pool.reservations import Reservation, Ticket, amount_text, open_reservations
from xray_runtime.cluster.progress import find_progress
from xray_runtime.cluster.protocols import Pingable, WorkhorseHandle, get
from xray_runtime.cluster.workhorse import Workhorse
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.errors import StageInterruptedError

POLL_SECONDS = 0.2
"""Interval at which a stage asks whether it has its turn."""
RETRY_SECONDS = 1.0
EVICTED_SECONDS = 3.0
"""Longest time for Ray to count the CPUs of ended processes as free."""
GROUP_SECONDS = 30.0
"""Time for Ray to reserve placement groups that fit, on a machine with a core for each process."""
START_SECONDS = 120.0
"""Time for processes that fit to start, on such a machine."""
NODE_SECONDS = 1.0
ROUNDING = 1e-4
"""Ray counts in ten-thousandths."""

log = logging.getLogger(__name__)


class BusyClusterError(RuntimeError):
    """Others held the requested resources during the whole wait."""


@dataclass(frozen=True)
class AcquireRequest:
    demand: Demand
    kind: type[Workhorse]
    holder: Pingable
    """The WholeModel of the Workhorses: the pool kills them when it is dead."""
    libraries: str


class Acquisition:
    """The Workhorses of one stage: `acquire` them, and `release` them at the end, whatever happens.

    Args:
        run_id: of the run whose worker pool is used; if it has none, Workhorses are started and killed here.
        log_dir: log directory of the stage, which identifies it for people.
    """

    def __init__(self, requests: Sequence[AcquireRequest], runtime: RuntimeConfig, log_dir: Path, run_id: str) -> None:
        self._requests, self._runtime, self._log_dir, self._run_id = requests, runtime, log_dir, run_id
        self._demands = [request.demand for request in requests]
        self._pool = find_worker_pool(run_id)
        self._progress = find_progress(run_id)
        self._reservations = open_reservations()
        self._ticket = Ticket(run_id, str(log_dir), requests[0].holder)
        self._groups: list[PlacementGroup] = []
        self._started: list[WorkhorseHandle] = []
        """Workhorses that are not from the pool."""

    def acquire(self) -> dict[str, list[WorkhorseHandle]]:
        """Role → its Workhorses in order of rank.

        Raises:
            ConfigError: the cluster has too few resources. Nothing was started.
            BusyClusterError: others held the resources for `runtime.wait_timeout_s`, or no node replaced a lost one.
            StageInterruptedError: the run was asked to stop.
        """
        await_answers()
        await_nodes(self._log_dir.name, self._demands, self._runtime.wait_timeout_s)
        self._deadline = time.monotonic() + self._runtime.wait_timeout_s
        while True:
            try:
                while not get(self._reservations.is_next.remote(self._ticket)):
                    self._wait(POLL_SECONDS)
                workhorses = self._reserve()
                if workhorses is not None:
                    reservation = Reservation(total(self._demands), list(self._groups))
                    get(self._reservations.grant.remote(self._ticket, reservation))
                    return workhorses
            finally:
                get(self._reservations.leave.remote(self._ticket))
            self._wait(RETRY_SECONDS)

    def release(self, reusable: Sequence[Pingable] = ()) -> None:
        """Kill the Workhorses, except that the pool keeps those whose holder is in `reusable`."""
        self._free(reusable)
        with contextlib.suppress(RayActorError):
            get(self._reservations.end.remote(self._ticket))

    def _free(self, reusable: Sequence[Pingable] = ()) -> None:
        for workhorse in self._started:
            ray.kill(workhorse)
        self._started.clear()
        if self._pool is not None:
            # A dead pool took its processes with it.
            with contextlib.suppress(RayActorError):
                for holder in reusable:
                    get(self._pool.release.remote(holder))
                get(self._pool.kill_leased.remote([request.holder for request in self._requests]))
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()

    def _wait(self, seconds: float) -> None:
        """Sleep. Raises if waiting longer is useless; see `acquire`."""
        if time.monotonic() > self._deadline:
            if not get(self._reservations.holds.remote(self._run_id)):
                raise self._busy()
            self._deadline = time.monotonic() + self._runtime.wait_timeout_s
        if self._progress is not None:
            name = self._log_dir.name
            if get(self._progress.report.remote(name, 0, 0, "", f"waiting for {amount_text(total(self._demands))}")):
                raise StageInterruptedError(f"{name}: stopped while waiting for devices")
        time.sleep(seconds)

    def _busy(self) -> BusyClusterError:
        wanted = "; ".join(f"{d.role} {amount_text(d.each(d.num_ranks))}" for d in self._demands)
        holders = holders_text(get(self._reservations.holders.remote()))
        seconds = f"{self._runtime.wait_timeout_s:g} s (runtime.wait_timeout_s)"
        return BusyClusterError(f"waited {seconds} for {wanted}, which are in use by {holders}")

    def _reserve(self) -> dict[str, list[WorkhorseHandle]] | None:
        """Reserve everything; returns None, with nothing held, if that is impossible now."""
        if not self._is_unreserved():
            return None
        if not self._is_free() and not (evict_idle_workers() and _poll(self._is_free, EVICTED_SECONDS * load())):
            return None
        workhorses = None
        try:
            workhorses = self._start_all()
        finally:
            if workhorses is None:
                self._free()
        return workhorses

    def _is_unreserved(self) -> bool:
        """Whether other stages have left enough. Resources of idle processes and of other users do not count."""
        everything, reserved = ray.cluster_resources(), get(self._reservations.reserved.remote())
        return all(
            amount <= everything.get(name, 0.0) - reserved.get(name, 0.0) + ROUNDING
            for name, amount in total(self._demands).items()
        )

    def _is_free(self) -> bool:
        """Whether Ray has enough free resources for the processes that the pool does not have idle."""
        wanted: Counter[type[Workhorse]] = Counter()
        for request in self._requests:
            if not request.demand.grouped():
                wanted[request.kind] += request.demand.num_ranks
        reused = 0
        if self._pool is not None and wanted:
            reused = wanted.total() - get(self._pool.num_missing.remote(dict(wanted), self._runtime))
        new, free = total(self._demands), ray.available_resources()
        new["CPU"] = new.get("CPU", 0.0) - reused * self._runtime.cpus_per_workhorse
        return all(amount <= free.get(name, 0.0) + ROUNDING for name, amount in new.items())

    def _start_all(self) -> dict[str, list[WorkhorseHandle]] | None:
        seats: dict[tuple[str, int], tuple[PlacementGroup, int]] = {}
        for plan in plan_groups(self._demands, nodes()):
            group = request_group(plan, f"{self._run_id} {self._log_dir}")
            self._groups.append(group)
            seats |= {seat: (group, bundle) for seat, bundle in plan.seats.items()}
        if not are_ready(self._groups, GROUP_SECONDS * load()):
            return None
        workhorses: dict[str, list[WorkhorseHandle]] = {}
        for request in self._requests:
            demand = request.demand
            if self._pool is not None and not demand.grouped():
                leased = self._pool.acquire.remote(
                    request.kind, self._runtime, demand.num_ranks, request.holder, request.libraries
                )
                workhorses[demand.role] = get(leased)
                continue
            workhorses[demand.role] = []
            for rank in range(demand.num_ranks):
                group, bundle = seats.get((demand.role, rank), (None, 0))
                workhorse = start(request.kind, self._runtime, request.libraries, demand.gpus, group, bundle)
                self._started.append(workhorse)
                workhorses[demand.role].append(workhorse)
        # A placement group reserves the devices of its Workhorses; others have theirs once their process is up.
        singles = [w for d in self._demands if not d.grouped() for w in workhorses[d.role]]
        calls = [request_heartbeat(workhorse) for workhorse in singles]
        up = ray.wait(calls, num_returns=len(calls), timeout=START_SECONDS * load())[0] if calls else []
        return workhorses if len(up) == len(calls) else None


def await_nodes(what: str, demands: Sequence[Demand], timeout_s: float) -> None:
    """Wait until the nodes have enough for `demands`: new ones may replace lost ones.

    Raises:
        ConfigError: they do not have enough, and none was lost.
        BusyClusterError: no node came within `timeout_s`.
    """
    deadline, warned = time.monotonic() + timeout_s, False
    while True:
        try:
            return check(what, demands, nodes())
        except ConfigError as error:
            if not num_lost():
                raise
            if time.monotonic() > deadline:
                raise BusyClusterError(
                    f"waited {timeout_s:g} s (runtime.wait_timeout_s) for a node to replace one that was lost: {error}"
                ) from None
            if not warned:
                log.warning("waiting for a node to replace one that was lost: %s", error)
                warned = True
        time.sleep(NODE_SECONDS)


def _poll(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
