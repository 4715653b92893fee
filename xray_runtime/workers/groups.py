"""Placement groups: a model gets all its devices at once or none.

A bundle is one tensor-parallel group, and thus on one node if any node is large enough. The bundles of a trained model
are packed on few nodes; those of a generator's replicas are spread. A model of one Workhorse on CPU has no group: its
process comes from the run's worker pool.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from xray_runtime.planning.demand import Demand
from xray_runtime.workers.nodes import nodes
from xray_runtime.workers.reservations import amount_text

PREFIX = "xray "


def request_group(demand: Demand, name: str) -> PlacementGroup:
    """Request the placement group of one model from Ray; it may not be ready yet.

    Args:
        name: its name on Ray's pages, after `PREFIX`. An older group of this name is removed.
    """
    # Groups of a killed stage live as long as the driver, and its next attempt uses the same names.
    with contextlib.suppress(ValueError):
        remove_placement_group(ray.util.get_placement_group(PREFIX + name))
    whole = demand.each(demand.together)
    fits = any(all(node.get(n, 0.0) >= amount for n, amount in whole.items()) for node in nodes())
    ranks = demand.together if fits else 1
    bundles = [demand.each(ranks) for _ in range(demand.num_ranks // ranks)]
    return placement_group(bundles, strategy="SPREAD" if demand.role == "generator" else "PACK", name=PREFIX + name)


def are_ready(groups: Collection[PlacementGroup], timeout_s: float) -> bool:
    """Whether Ray reserves all `groups` within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    return all(group.wait(max(deadline - time.monotonic(), 0.0)) for group in groups)


def bundle_of(demand: Demand, group: PlacementGroup, rank: int) -> int:
    """The bundle of `group` for Workhorse `rank`."""
    return int(rank * group.bundle_count // demand.num_ranks)


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
