"""Where Workhorse processes wait between stages.

Starting one costs seconds of imports (torch, transformers, DeepSpeed; vLLM most of all), and on a laptop that would be
most of a short stage. On CPU a process that did its work well is therefore kept, and the next model is built in it; and
those that only the next stage needs start while this one works. On CUDA, and for models of several ranks, every model
gets new processes: device memory and process groups are cleanest given back by ending.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.workers.nodes import same_node

NAME, NAMESPACE = "xray-stable", "xray"
HEARTBEAT = "heartbeat"
PING_SECONDS = 0.5
HEARTBEAT_SECONDS = 10.0
"""Who waits has nothing else to do than to answer."""


Kind = tuple[str, str]
"""What makes two Workhorses interchangeable: their class, and the runtime settings they were started with."""


@dataclass(frozen=True)
class _Loan:
    borrower: Any
    workhorse: Any
    kind: Kind
    what_for: str


class Stable:
    """Owns the Workhorses it lends, so that they outlive the stage that borrowed them."""

    def __init__(self) -> None:
        self._idle: list[tuple[Kind, Any]] = []
        self._lent: list[_Loan] = []

    def ping(self) -> None:
        """Answers where the stable lives."""

    def expect(self, kind: type, runtime: RuntimeConfig, count: int, *libraries: Any) -> None:
        """Have `count` Workhorses of class `kind`, lent ones included, by the time they are asked for.

        Those that are missing are started and told to load their `libraries`, as far as there are CPUs for them.
        """
        want = _kind(kind, runtime)
        missing = count - sum(k == want for k, _ in self._idle) - sum(loan.kind == want for loan in self._lent)
        for _ in range(missing):
            if ray.available_resources().get("CPU", 0.0) < runtime.cpus_per_workhorse:
                break
            workhorse = start(kind, runtime)
            workhorse.load_libraries.remote(*libraries)
            self._idle.append((want, workhorse))

    def lend(self, kind: type, runtime: RuntimeConfig, borrower: Any, what_for: str = "") -> Any:
        """A Workhorse of class `kind`: a waiting one, or a new one. `borrower` is the WholeModel that asks."""
        want = _kind(kind, runtime)
        held = f"{what_for}: {runtime.cpus_per_workhorse:g} CPUs"
        for entry in [e for e in self._idle if e[0] == want]:
            self._idle.remove(entry)
            if _alive(entry[1]):
                self._lent.append(_Loan(borrower, entry[1], want, held))
                return entry[1]
            ray.kill(entry[1])
        self._reap()
        if ray.available_resources().get("CPU", 0.0) < runtime.cpus_per_workhorse:
            self.evict_idle()
        workhorse = start(kind, runtime)
        self._lent.append(_Loan(borrower, workhorse, want, held))
        return workhorse

    def release_worker(self, kind: type, runtime: RuntimeConfig, workhorse: Any) -> None:
        """Take back a Workhorse that is sound and idle."""
        self._lent = [loan for loan in self._lent if loan.workhorse != workhorse]
        self._idle.append((_kind(kind, runtime), workhorse))

    def kill_leased(self, borrowers: list[Any]) -> None:
        """End what `borrowers` have not given back."""
        for loan in [loan for loan in self._lent if loan.borrower in borrowers]:
            ray.kill(loan.workhorse)
            self._lent.remove(loan)

    def holders(self) -> list[str]:
        """Who has borrowed what."""
        return [loan.what_for for loan in self._lent]

    def evict_idle(self) -> None:
        """End those that wait: they must not starve those that are wanted."""
        for _, workhorse in self._idle:
            ray.kill(workhorse)
        self._idle.clear()

    def _reap(self) -> None:
        """End what a dead borrower (a killed stage) left behind."""
        pings = {loan.borrower.ping.remote(): loan for loan in self._lent}
        if not pings:
            return
        # Who is busy does not answer in time; all are asked at once, so that many busy ones cost no more than one.
        for ping in ray.wait(list(pings), num_returns=len(pings), timeout=PING_SECONDS)[0]:
            if not _answered(ping):
                ray.kill(pings[ping].workhorse)
                self._lent.remove(pings[ping])


def open_worker_pool() -> Any:
    """The stable of this cluster, made where there is none. It lives as long as the process that made it."""
    options = {"name": NAME, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
    while True:
        stable = ray.remote(Stable).options(**options, scheduling_strategy=same_node()).remote()
        if _answered(stable.ping.remote()):
            return stable
        # Ray keeps the name for a dead actor, until it is killed too.
        ray.kill(stable)


def find_worker_pool() -> Any | None:
    """The stable, or None where nobody opened one, or it died."""
    with contextlib.suppress(ValueError):
        stable = ray.get_actor(NAME, namespace=NAMESPACE)
        return stable if _answered(stable.ping.remote()) else None  # by its name Ray finds a dead actor too
    return None


def start(kind: type, runtime: RuntimeConfig, gpus: float = 0.0, group: Any = None, bundle: int = 0) -> Any:
    """A new Workhorse process, in bundle `bundle` of the placement group `group` where there is one."""
    options: dict[str, Any] = {"num_cpus": runtime.cpus_per_workhorse, "num_gpus": gpus, "max_restarts": 0}
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    # Pulses are answered in a thread of their own, so that one who works can be told from one who stands still.
    return ray.remote(concurrency_groups={HEARTBEAT: 1})(kind).options(**options).remote(runtime)


def heartbeat(workhorse: Any) -> Any:
    """Ask a Workhorse for a sign of life, also while it works: a reference to its `Pulse`."""
    return workhorse.heartbeat.options(concurrency_group=HEARTBEAT).remote()


def _kind(kind: type, runtime: RuntimeConfig) -> Kind:
    return kind.__name__, runtime.model_dump_json()


def _alive(workhorse: Any) -> bool:
    return _answered(heartbeat(workhorse), HEARTBEAT_SECONDS)


def _answered(ref: Any, timeout_s: float | None = None) -> bool:
    try:
        ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayError:
        return False
    return True
