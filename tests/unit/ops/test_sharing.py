"""The GPUs of models that share them, by arithmetic; the groups that Ray is asked for, without Ray."""

from __future__ import annotations

from collections import Counter

import pytest

from xray_runtime.cluster.pool.demand import Demand, check, first_gpus, total
from xray_runtime.cluster.pool.groups import plan_groups
from xray_runtime.kernel.config.validation import ConfigError

NODES = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 4.0}]


def models(share: float, *ranks: tuple[int, int]) -> list[Demand]:
    """Models m0, m1, … of (ranks, tensor-parallel degree) with a share of a GPU each."""
    return [Demand(f"m{i}", count, 0.5, share, together) for i, (count, together) in enumerate(ranks)]


@pytest.mark.parametrize(
    ("share", "ranks", "first", "num_gpus"),
    [
        # All fit on the GPUs of the widest; the narrow ones go where there is least.
        (0.25, [(4, 1), (1, 1), (1, 1)], [0, 0, 1], 4),
        # A third is written as 0.333.
        (0.333, [(2, 1), (2, 2), (2, 1)], [0, 0, 0], 2),
        # Two a GPU: four models of two ranks need four GPUs.
        (0.5, [(2, 1), (2, 1), (2, 1), (2, 1)], [0, 2, 0, 2], 4),
        (0.5, [(1, 1)] * 4, [0, 1, 0, 1], 2),
        # Three ranks of two fit beside each other on three GPUs only if they could be split: a fourth is needed.
        (0.5, [(2, 1), (2, 1), (2, 1)], [0, 0, 2], 4),
        # A tensor-parallel group begins at a multiple of its degree.
        (0.5, [(3, 1), (3, 1), (2, 2)], [0, 0, 4], 6),
    ],
)
def test_every_gpu_holds_at_most_one_rank_of_a_model(
    share: float, ranks: list[tuple[int, int]], first: list[int], num_gpus: int
) -> None:
    demands = models(share, *ranks)
    found, count = first_gpus(demands)
    assert ([found[demand.role] for demand in demands], count) == (first, num_gpus)
    held = Counter(found[d.role] + rank for d in demands for rank in range(d.num_ranks))
    assert max(held.values()) <= 1 / share + 0.01


def test_shared_gpus_are_reserved_whole_and_others_as_before() -> None:
    assert total(models(0.25, (4, 1), (1, 1))) == {"CPU": 2.5, "GPU": 4.0}
    assert total(models(1.0, (4, 1), (1, 1))) == {"CPU": 2.5, "GPU": 5.0}
    with pytest.raises(ConfigError, match=r"need 4 GPUs \(m0 4 × 0.25, m1 1 × 0.25\) and the cluster has 2"):
        check("ppo", models(0.25, (4, 1), (1, 1)), [{"CPU": 16.0, "GPU": 2.0}])


def test_a_bundle_is_one_gpu_and_a_tensor_parallel_group_is_on_one_node() -> None:
    [one] = plan_groups(models(0.5, (2, 1), (2, 1)), NODES)
    assert (one.strategy, one.bundles) == ("PACK", [{"GPU": 1.0, "CPU": 1.0}] * 2)
    assert one.seats == {("m0", 0): 0, ("m0", 1): 1, ("m1", 0): 0, ("m1", 1): 1}
    left, right = plan_groups(models(0.5, (4, 1), (4, 2)), NODES)
    assert left.strategy == right.strategy == "STRICT_PACK"
    assert right.seats == {("m0", 2): 0, ("m0", 3): 1, ("m1", 2): 0, ("m1", 3): 1}
    # Where no node is large enough, one group over all nodes is better than none.
    [spread] = plan_groups(models(0.5, (4, 4), (4, 1)), [{"CPU": 16.0, "GPU": 2.0}] * 2)
    assert (spread.strategy, len(spread.bundles)) == ("PACK", 4)
