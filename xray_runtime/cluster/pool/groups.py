"""Placement groups: a model gets all its devices at once or none.

A bundle is one tensor-parallel group, and thus on one node if any node is large enough. The bundles of a trained model
are packed on few nodes; those of a generator's replicas are spread. A model of one Workhorse on CPU has no group: its
process comes from the run's worker pool.

Models that share GPUs have common groups, with a bundle for each GPU; see `cluster.pool.demand`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from xray_runtime.cluster.pool.demand import Demand, Resources, first_gpus, shares_gpus
from xray_runtime.cluster.pool.reservations import amount_text

PREFIX = "xray "


@dataclass(frozen=True)
class GroupPlan:
    """A placement group to request."""

    name: str
    bundles: list[dict[str, float]]
    strategy: str
    seats: dict[tuple[str, int], int]
    """(role, rank) → the bundle of that Workhorse."""


def plan_groups(demands: Sequence[Demand], nodes: Sequence[Resources]) -> list[GroupPlan]:
    """The placement groups of a stage's models on a cluster with these `nodes`, the widest bundles first: after single
    ones, no node might have enough space for them."""
    grouped = [demand for demand in demands if demand.each() and demand.grouped()]
    if shares_gpus(grouped):
        return list(_shared(grouped, nodes))
    return [_own(demand, nodes) for demand in sorted(grouped, key=lambda d: d.together, reverse=True)]


def _own(demand: Demand, nodes: Sequence[Resources]) -> GroupPlan:
    together = demand.together if _fits(demand.each(demand.together), nodes) else 1
    bundles = [demand.each(together) for _ in range(demand.num_ranks // together)]
    strategy = "SPREAD" if demand.role == "generator" else "PACK"
    seats = {(demand.role, rank): rank // together for rank in range(demand.num_ranks)}
    return GroupPlan(demand.role, bundles, strategy, seats)


def _shared(demands: Sequence[Demand], nodes: Sequence[Resources]) -> Iterator[GroupPlan]:
    """One group for every tensor-parallel group of GPUs, on one node if any node is large enough; else one in all."""
    first, num_gpus = first_gpus(demands)
    gpu_of = {(d.role, rank): first[d.role] + rank for d in demands for rank in range(d.num_ranks)}
    cpus = {demand.role: demand.cpus for demand in demands}
    bundles = [{"GPU": 1.0} for _ in range(num_gpus)]
    for (role, _), gpu in gpu_of.items():
        if cpus[role]:
            bundles[gpu]["CPU"] = bundles[gpu].get("CPU", 0.0) + cpus[role]
    width = math.lcm(*(demand.together for demand in demands))
    bundle_of_group = {name: max(bundle.get(name, 0.0) for bundle in bundles) * width for name in ("CPU", "GPU")}
    if width == 1 or not _fits(bundle_of_group, nodes):
        yield GroupPlan("shared", bundles, "PACK", gpu_of)
        return
    for start in range(0, num_gpus, width):
        seats = {seat: gpu - start for seat, gpu in gpu_of.items() if start <= gpu < start + width}
        yield GroupPlan(f"shared {start // width}", bundles[start : start + width], "STRICT_PACK", seats)


def _fits(amounts: Resources, nodes: Sequence[Resources]) -> bool:
    """Whether one of `nodes` has these amounts."""
    return any(all(node.get(name, 0.0) >= amount for name, amount in amounts.items()) for node in nodes)


def request_group(plan: GroupPlan, stage: str) -> PlacementGroup:
    """Request a placement group of `stage` from Ray; it may not be ready yet. An older group of its name is removed."""
    name = f"{PREFIX}{stage} {plan.name}"
    # Groups of a killed stage live as long as the driver, and its next attempt uses the same names.
    with contextlib.suppress(ValueError):
        remove_placement_group(ray.util.get_placement_group(name))
    return placement_group(plan.bundles, strategy=plan.strategy, name=name)


def are_ready(groups: Collection[PlacementGroup], timeout_s: float) -> bool:
    """Whether Ray reserves all `groups` within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    return all(group.wait(max(deadline - time.monotonic(), 0.0)) for group in groups)


def holders_text(stages: Sequence[str]) -> str:
    """The free resources of this cluster, and the known holders of the rest: `stages` and other placement groups."""
    total, free = ray.cluster_resources(), ray.available_resources()
    lines = [f"free: {', '.join(f'{free.get(n, 0.0):g} {n}s' for n in ('CPU', 'GPU') if n in total) or 'nothing'}"]
    for group in placement_group_table().values():
        if group["state"] == "CREATED" and not group["name"].startswith(PREFIX):
            bundles = group["bundles"].values()
            amounts = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
            lines.append(f"{group['name'] or 'a group without a name'}: {amount_text(amounts)}")
    return "; ".join([*lines, *stages])
