"""Where Workhorses go: Ray placement groups, so that a model gets all its devices at once or none.

A bundle is one tensor-parallel group, hence never cut over nodes where one can hold it whole. The bundles of a trained
model are packed on as few nodes as can be; those of a generator's replicas are spread. Models of one Workhorse on CPU
have no group: the stable keeps their processes.

More than the cluster has is refused at once; what others hold, or a lost node had, is waited for,
`runtime.wait_timeout_s` long.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.planning.auto import choose_layouts, describe
from xray_runtime.planning.demand import Demand, check, check_config
from xray_runtime.planning.workload import Machine
from xray_runtime.workers.nodes import await_answers, nodes, num_lost
from xray_runtime.workers.pool import find_worker_pool

START_SECONDS = 10.0
"""What is not there by then may be held by idle Workhorses of the stable."""
PREFIX = "xray "
ASK_SECONDS = 120.0
NODE_SECONDS = 1.0

log = logging.getLogger(__name__)


class BusyClusterError(RuntimeError):
    """Others held what was asked for all the time it was waited for."""


def device(runtime: RuntimeConfig) -> str:
    """ "cpu" or "cuda". Asked of the cluster, not of this process: a controller has no device of its own."""
    if runtime.device != "auto":
        return runtime.device
    return "cuda" if any(node.get("GPU", 0.0) for node in nodes()) else "cpu"


def resolve_layouts(config: LifecycleConfig) -> tuple[LifecycleConfig, str]:
    """`config` with what `runtime.parallel: auto` leaves to choose chosen for this cluster; and the choice in words.

    Raises:
        ConfigError: nothing fits, or more is asked for than the cluster has.
    """
    words = ""
    if config.runtime.parallel == "auto":
        config, plan = choose_layouts(config, cluster_machine(config.runtime))
        words = describe(plan)
    check_config(config, device(config.runtime), nodes())
    return config, words


def with_device(config: LifecycleConfig) -> LifecycleConfig:
    """`config` with the device that `runtime.device: auto` means on this cluster now."""
    runtime = config.runtime.model_copy(update={"device": device(config.runtime)})
    return config.model_copy(update={"runtime": runtime})


def cluster_machine(runtime: RuntimeConfig) -> Machine:
    """This cluster as equal devices: the least of each quantity, so that a plan fits everywhere."""
    kind = device(runtime)
    found = ray.get(
        [
            _memory.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(kind)
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("GPU" if kind == "cuda" else "CPU", 0.0) >= 1
        ],
        timeout=ASK_SECONDS,
    )
    if kind == "cuda":
        gpus = [memory for node in found for memory in node]
        return Machine(num_devices=len(gpus), memory_bytes=min(gpus), devices_per_node=min(map(len, found)))
    cores = [int(node["CPU"]) for node in nodes() if node.get("CPU", 0.0) >= 1]
    counts = [max(n // runtime.threads, 1) for n in cores]
    memory = min(total // count for [total], count in zip(found, counts, strict=True))
    return Machine(num_devices=sum(counts), memory_bytes=memory, device="cpu", devices_per_node=min(counts))


@ray.remote(num_cpus=0)
def _memory(kind: str) -> list[int]:
    """Bytes of each GPU of this node, or of its RAM."""
    if kind == "cpu":
        return [psutil.virtual_memory().total]
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return [int(mebibytes) * 2**20 for mebibytes in lines]


@contextlib.contextmanager
def reserved(demands: Sequence[Demand], runtime: RuntimeConfig, log_dir: Path) -> Iterator[dict[str, Any]]:
    """Role → placement group of the models that need one, all of them ready; removed at the end, whatever happens.

    Raises:
        ConfigError: the cluster does not have that much. Nothing was started.
        BusyClusterError: it has, but others held it for `runtime.wait_timeout_s`; or it had, and no node came in place
            of those that were lost.
    """
    await_answers()
    have = _nodes_for(log_dir.name, demands, runtime.wait_timeout_s)
    groups: dict[str, Any] = {}
    try:
        # The widest bundles first: single ones could leave none of the nodes with room for them.
        for demand in sorted(demands, key=lambda d: d.together, reverse=True):
            if demand.each() and demand.grouped():
                groups[demand.role] = _request(demand, have, f"{PREFIX}{log_dir} {demand.role}")
        _await(groups, runtime.wait_timeout_s)
        yield groups
    finally:
        for group in groups.values():
            remove_placement_group(group)


def _nodes_for(what: str, demands: Sequence[Demand], timeout_s: float) -> list[dict[str, float]]:
    """The nodes, once they are enough: where some were lost, others may come."""
    deadline, error_summary = time.monotonic() + timeout_s, False
    while True:
        have = nodes()
        try:
            check(what, demands, have)
        except ConfigError as error:
            if not num_lost():
                raise
            if time.monotonic() > deadline:
                raise BusyClusterError(
                    f"waited {timeout_s:g} s (runtime.wait_timeout_s) for a node in place of one that was lost: {error}"
                ) from None
            if not error_summary:
                log.warning("waiting for a node in place of one that was lost: %s", error)
                error_summary = True
            time.sleep(NODE_SECONDS)
        else:
            return have


def bundle_of(demand: Demand, group: Any, rank: int) -> int:
    """The bundle of `group` where Workhorse `rank` goes."""
    return rank * group.bundle_count // demand.num_ranks


def holders() -> str:
    """Who holds what on this cluster, as far as X-ray knows, and what is free."""
    free = ray.available_resources()
    lines = [f"free: {', '.join(f'{free.get(n, 0.0):g} {n}s' for n in ('CPU', 'GPU') if n in _total()) or 'nothing'}"]
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            lines.append(f"{group['name'] or 'a group without a name'}: {_amount(list(group['bundles'].values()))}")
    stable = find_worker_pool()
    if stable is not None:
        lines += ray.get(stable.holders.remote())
    return "; ".join(lines)


def _request(demand: Demand, have: list[dict[str, float]], name: str) -> Any:
    # A stage that was killed left its groups, which live as long as the driver; its next attempt has the same names.
    with contextlib.suppress(ValueError):
        remove_placement_group(ray.util.get_placement_group(name))
    whole = demand.each(demand.together)
    fits = any(all(node.get(n, 0.0) >= amount for n, amount in whole.items()) for node in have)
    ranks = demand.together if fits else 1
    bundles = [demand.each(ranks) for _ in range(demand.num_ranks // ranks)]
    return placement_group(bundles, strategy="SPREAD" if demand.role == "generator" else "PACK", name=name)


def _await(groups: dict[str, Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    if not _ready(groups, min(START_SECONDS, timeout_s)):
        evict_idle()
        if not _ready(groups, deadline - time.monotonic()):
            waiting = [role for role, group in groups.items() if not group.wait(0)]
            asked = "; ".join(f"{role} {_amount(groups[role].bundle_specs)}" for role in waiting)
            raise BusyClusterError(
                f"waited {timeout_s:g} s (runtime.wait_timeout_s) for {asked}, which others hold: {holders()}"
            )


def _ready(groups: dict[str, Any], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    return all(group.wait(max(deadline - time.monotonic(), 0.0)) for group in groups.values())


def evict_idle() -> None:
    """End the processes that wait in the stable: they must not starve those that are wanted."""
    stable = find_worker_pool()
    if stable is not None:
        ray.get(stable.evict_idle.remote())


def _amount(bundles: list[dict[str, float]]) -> str:
    totals = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
    return ", ".join(f"{amount:g} {name}s" for name, amount in totals.items() if amount)


def _total() -> dict[str, float]:
    total: dict[str, float] = ray.cluster_resources()
    return total
