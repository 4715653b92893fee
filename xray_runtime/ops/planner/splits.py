"""Splits of a model that its engines support, and the devices that remain for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.engines.layouts import TRAINERS
from xray_runtime.engines.trainer import trainer
from xray_runtime.models.family import family_of
from xray_runtime.ops.planner.memory import Layout
from xray_runtime.ops.planner.workload import PlannedRole, Workload

DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees and numbers of pipeline stages."""
MAX_RANKS = 1024


def splits(roles: Sequence[PlannedRole], machine: Machine) -> Iterator[tuple[int, int]]:
    """(tensor-parallel degree, pipeline stages) that all of `roles` support for a replica: whole first, then by
    increasing communication.
    """
    if not roles:
        return
    yield 1, 1
    if any(_is_whole(role) for role in roles):
        return
    # This takes seconds of imports, so it runs only if whole replicas do not fit.
    by_tensor, by_layers = map(all, zip(*(_can_split(role.library, role.model) for role in roles), strict=True))
    heads = math.gcd(*(size for role in roles for size in (role.shape.num_heads, role.shape.num_kv_heads)))
    layers = min(role.shape.num_layers for role in roles)
    tensor = [tp for tp in DEGREES if tp == 1 or (by_tensor and heads % tp == 0 and tp <= machine.node_size)]
    stages = [pp for pp in DEGREES if pp == 1 or (by_layers and pp <= layers)]
    # As `training_config.check_trained_part`.
    adapted = any(role.options.lora_rank is not None for role in roles)
    yield from ((tp, pp) for pp in stages for tp in tensor if tp * pp > 1 and not (adapted and min(tp, pp) > 1))


def groups(machine: Machine, tp: int, others: Sequence[int]) -> int:
    """Number of groups of `tp` devices on one node that remain after each of `others` takes its devices on one node."""
    node = machine.node_size
    free = [node] * (machine.num_devices // node) + [machine.num_devices % node]
    for size in sorted(others, reverse=True):
        # Choose the node that loses the fewest groups, and among those the fullest.
        open_to = [i for i, left in enumerate(free) if left >= size]
        if not open_to:
            return 0
        free[min(open_to, key=lambda i: (free[i] // tp - (free[i] - size) // tp, free[i]))] -= size
    return sum(left // tp for left in free)


def shared_rows(workload: Workload) -> Iterator[Workload]:
    """The workload with more and more ranks that share the tokens of each row, where a pass is a single long row."""
    roles = workload.of_use("trained")
    if not roles or not workload.is_long:
        return
    all_pack = all(role.top_layers is None and family_of(role.shape.family).packs for role in roles)
    if all_pack and all(trainer(role.library).capabilities.sequence_parallel for role in roles):
        heads = math.gcd(*(role.shape.num_heads for role in roles))
        yield from (replace(workload, sequence_parallel=sp) for sp in DEGREES[1:] if heads % sp == 0)


def trained_layouts(workload: Workload, tp: int, pp: int, dp: int) -> Iterator[Layout]:
    """Layouts of the trained models by ZeRO stage: from the lowest that all support; more only for several replicas,
    and 3 only for whole ones."""
    options = [role.options for role in workload.of_use("trained")]
    least = max((each.least_zero_stage for each in options), default=0)
    of_all = [each.sharding.split_levels if tp * pp > 1 else each.sharding.levels for each in options] or [(0,)]
    stages = sorted(stage for stage in set(of_all[0]).intersection(*of_all) if stage >= least)
    sp = workload.sequence_parallel
    for stage in stages[:1] if dp * sp == 1 else stages:
        yield Layout(zero_stage=stage, tp=tp, pp=pp, dp=dp, sp=sp)
        if stage == 3 and tp * pp * sp == 1:
            degrees = (ep for ep in DEGREES[1:] if dp % ep == 0 and _share_experts(workload.of_use("trained"), ep))
            yield from (Layout(zero_stage=3, dp=dp, ep=ep) for ep in degrees)


def _share_experts(roles: Sequence[PlannedRole], degree: int) -> bool:
    return all(
        TRAINERS.get(role.library).capabilities.expert_parallel
        and role.shape.experts is not None
        and role.shape.experts.number % degree == 0
        for role in roles
    )


def zero3_shards(workload: Workload, machine: Machine) -> Iterator[Layout]:
    """ZeRO-3 over more and more devices, each with its own rows."""
    most = min(machine.num_devices, workload.rollout_size, MAX_RANKS)
    yield from (Layout(zero_stage=3, dp=2**n) for n in range(1, most.bit_length()))


def _is_whole(role: PlannedRole) -> bool:
    # A frozen trunk is computed whole, once per rollout; offload to disk works only with ZeRO.
    return role.in_one_piece or role.top_layers is not None or role.options.least_zero_stage == 3


@cache
def _can_split(library: str, model: str | None) -> tuple[bool, bool]:
    try:
        return (True, True) if model is None else trainer(library).can_split(model)
    except OSError:  # a well-known model, of which nothing is here
        return False, False
