"""The worker pool of a run: Workhorse processes that wait between stages.

Imports take seconds at the start of a process (torch, transformers, DeepSpeed, above all vLLM), on a laptop most of a
short stage. On CPU a process is therefore kept for the next model, and processes for the next stage start ahead. On
CUDA, and for models of several ranks, every model gets new processes, since ending a process is the most reliable way
to free device memory and process groups.

Each run has its own pool. Idle processes hold CPUs: a stage that lacks CPUs has every pool of the cluster evict its
idle ones (`evict_idle_workers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from xray_runtime.cluster.heartbeat import CONCURRENCY_GROUP, request_heartbeat
from xray_runtime.cluster.pool.libraries import worker_options
from xray_runtime.cluster.pool.liveness import Liveness, answered
from xray_runtime.cluster.pool.named import NamedActor
from xray_runtime.cluster.protocols import Pingable, RemoteMethod, WorkhorseHandle
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.cores import load

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from xray_runtime.cluster.workhorse import Workhorse

PING_SECONDS = 0.5
HEARTBEAT_SECONDS = 10.0
"""Time for an idle worker to answer a heartbeat; longer on a busy machine."""
EVICT_SECONDS = 10.0

Kind = tuple[str, str]
"""Class and runtime settings of a Workhorse; Workhorses with the same ones are interchangeable."""


@dataclass(frozen=True)
class _Lease:
    holder: Pingable
    workhorse: WorkhorseHandle
    kind: Kind


class WorkerPool:
    """Owns the Workhorses it leases, so that they outlive the stage that used them."""

    def __init__(self) -> None:
        self._idle: list[tuple[Kind, WorkhorseHandle]] = []
        self._leases: list[_Lease] = []
        self._liveness = Liveness()

    def ping(self) -> None:
        """Answers as long as the pool lives."""

    def prestart(self, kind: type[Workhorse], runtime: RuntimeConfig, count: int, libraries: str) -> None:
        """Start Workhorses of class `kind` until there are `count`, leased ones included, as far as CPUs are free.

        They load these `libraries`.
        """
        want = _kind(kind, runtime)
        missing = count - self._num_idle(want) - sum(lease.kind == want for lease in self._leases)
        for _ in range(missing):
            if ray.available_resources().get("CPU", 0.0) < runtime.cpus_per_workhorse:
                break
            workhorse = start(kind, runtime, libraries)
            workhorse.load_libraries.remote(libraries)
            self._idle.append((want, workhorse))

    def num_missing(self, wanted: Mapping[type[Workhorse], int], runtime: RuntimeConfig) -> int:
        """Number of `wanted` Workhorses (class → count) that are not idle here and would have to be started."""
        self._kill_abandoned()
        return sum(max(count - self._num_idle(_kind(kind, runtime)), 0) for kind, count in wanted.items())

    def acquire(
        self, kind: type[Workhorse], runtime: RuntimeConfig, count: int, holder: Pingable, libraries: str
    ) -> list[WorkhorseHandle]:
        """Lease `count` Workhorses of class `kind` to `holder`: idle ones first, then new ones."""
        self._kill_abandoned()
        want = _kind(kind, runtime)
        workhorses: list[WorkhorseHandle] = []
        for entry in [e for e in self._idle if e[0] == want]:
            if len(workhorses) == count:
                break
            self._idle.remove(entry)
            if answered(request_heartbeat(entry[1]), HEARTBEAT_SECONDS * load()):
                workhorses.append(entry[1])
            else:
                ray.kill(entry[1])
        workhorses += [start(kind, runtime, libraries) for _ in range(count - len(workhorses))]
        self._leases += [_Lease(holder, workhorse, want) for workhorse in workhorses]
        return workhorses

    def release(self, holder: Pingable) -> None:
        """End the leases of `holder`, whose Workhorses hold no model any more and become idle."""
        self._idle += [(lease.kind, lease.workhorse) for lease in self._leases if lease.holder == holder]
        self._leases = [lease for lease in self._leases if lease.holder != holder]

    def kill_leased(self, holders: Sequence[Pingable]) -> None:
        """Kill the Workhorses that `holders` still lease."""
        for lease in [lease for lease in self._leases if lease.holder in holders]:
            ray.kill(lease.workhorse)
            self._leases.remove(lease)

    def evict_idle(self) -> int:
        """Kill idle Workhorses and those of dead holders to free CPUs; returns how many."""
        killed = self._kill_abandoned() + len(self._idle)
        for _, workhorse in self._idle:
            ray.kill(workhorse)
        self._idle.clear()
        return killed

    def _num_idle(self, kind: Kind) -> int:
        return sum(k == kind for k, _ in self._idle)

    def _kill_abandoned(self) -> int:
        """Kill the Workhorses whose holder died (a killed stage); returns how many."""
        dead = self._liveness.dead({lease.holder for lease in self._leases}, PING_SECONDS)
        before = len(self._leases)
        self.kill_leased(dead)
        return before - len(self._leases)


class PoolHandle(Protocol):
    ping: RemoteMethod[[], None]
    prestart: RemoteMethod[..., None]
    num_missing: RemoteMethod[[Mapping[type[Workhorse], int], RuntimeConfig], int]
    acquire: RemoteMethod[[type[Workhorse], RuntimeConfig, int, Pingable, str], list[WorkhorseHandle]]
    release: RemoteMethod[[Pingable], None]
    kill_leased: RemoteMethod[[Sequence[Pingable]], None]
    evict_idle: RemoteMethod[[], int]


_POOLS: NamedActor[PoolHandle] = NamedActor(WorkerPool, "xray-worker-pool-")
open_worker_pool, find_worker_pool = _POOLS.open, _POOLS.find
"""The worker pool of a run. It ends with the process that started it."""


def evict_idle_workers() -> int:
    """Evict the idle Workhorses of every run on this cluster; returns how many."""
    calls = [pool.evict_idle.remote() for pool in _POOLS.find_all()]
    done = ray.wait(calls, num_returns=len(calls), timeout=EVICT_SECONDS)[0] if calls else []
    return sum(ray.get(call) for call in done if answered(call))


def start(
    kind: type[Workhorse],
    runtime: RuntimeConfig,
    libraries: str,
    gpus: float = 0.0,
    group: PlacementGroup | None = None,
    bundle: int = 0,
) -> WorkhorseHandle:
    """A new Workhorse process, in bundle `bundle` of placement group `group` if given."""
    options: dict[str, Any] = {"num_cpus": runtime.cpus_per_workhorse, "num_gpus": gpus, "max_restarts": 0}
    options |= worker_options(libraries)
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    # A separate thread answers heartbeats, which tells a busy Workhorse from one that hangs.
    workhorse: WorkhorseHandle
    workhorse = ray.remote(concurrency_groups={CONCURRENCY_GROUP: 1})(kind).options(**options).remote(runtime)
    return workhorse


def _kind(kind: type[Workhorse], runtime: RuntimeConfig) -> Kind:
    return kind.__name__, runtime.model_dump_json()
