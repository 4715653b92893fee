"""The planner of a stage: placement and layout of each model, for `xray plan` and `auto`.

It considers only layouts that Workhorses support and a config can express. Trained models get the first that fits:

    ZeRO 0 to 3         over whole replicas
    tensor parallel     a replica split over 2, 4, 8 devices of one node, ZeRO 0 to 2 over replicas
    and pipeline        in 2, 4, 8 stages, each on one device or split again

The last two go beyond ZeRO-3, which shards over at most as many ranks as a step has rows, each with all activations of
its pass. Frozen models are split only until one copy fits, or else sharded by ZeRO-3. The generator is split only by
tensor parallelism.
Placements:

    colocated   one rank per model, all models share the devices; on CPU as many ranks as are useful
    separate    own devices for each frozen model and the generator; the trained models share the rest

As many replicas are useful as a step has micro-batches; if that does not fit, all devices may be used. If no plan fits,
the search is repeated with activations recomputed in the backward pass: the same bits, a third more work. The search is
deterministic and tries a few hundred closed-form estimates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain
from typing import Literal, get_args

from xray_runtime.config.validation import ConfigError
from xray_runtime.planning.memory import Layout, Memory
from xray_runtime.planning.roles import Use
from xray_runtime.planning.workload import Machine, Role, Workload

MAX_DEVICES = 65_536
"""Largest number of devices that suggestions consider."""
MAX_RANKS = 1024
ALL_USES: tuple[Use, ...] = get_args(Use)
DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees and numbers of pipeline stages."""

Placement = Literal["colocated", "separate"]


@dataclass(frozen=True)
class RolePlan:
    """One role's layout, and its memory on one of its devices."""

    role: Role
    layout: Layout
    memory: Memory


@dataclass(frozen=True)
class Group:
    """Ranks that may share one device."""

    ranks: tuple[RolePlan, ...]
    in_turn: bool = False
    """The generator sleeps while the other models work: only its process stays."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory. Each rank is a process whose allocator keeps its own peak."""
        if not self.in_turn:
            return sum(rank.memory.total for rank in self.ranks)
        asleep = [rank.memory for rank in self.ranks if rank.role.use == "sampled"]
        others = [rank.memory for rank in self.ranks if rank.role.use != "sampled"]
        generating = sum(m.total for m in asleep) + sum(m.resident for m in others)
        return max(generating, sum(m.total for m in others) + sum(m.process for m in asleep))

    def largest(self) -> tuple[RolePlan, str, int]:
        """(role, field of `Memory`, bytes) of the largest item."""
        needs = [(rank, f.name, getattr(rank.memory, f.name)) for rank in self.ranks for f in fields(Memory)]
        return max(needs, key=lambda need: need[2])


@dataclass(frozen=True)
class Plan:
    """The chosen plan or, if none fits, the nearest."""

    placement: Placement
    roles: tuple[RolePlan, ...]
    groups: tuple[Group, ...]
    """The fullest possible devices."""
    layouts: Mapping[Use, Layout]
    """Roles with the same use share one layout."""
    workload: Workload
    machine: Machine
    reasons: tuple[str, ...] = ()
    """Why earlier candidates failed, one line per kind of layout."""

    @property
    def fullest(self) -> Group:
        return max(self.groups, key=lambda group: group.peak_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest.peak_bytes <= self.machine.usable_bytes

    @property
    def kind(self) -> str:
        """Short name of the kind of layout."""
        trained = self.layouts["trained"]
        split = ", split" if trained.tp * trained.pp > 1 else ""
        return self.placement + split + (", recomputing" if self.recomputes else "")

    @property
    def recomputes(self) -> bool:
        """Whether trained models recompute activations in the backward pass."""
        trained = [p.role for p in self.roles if p.role.use == "trained"]
        return bool(trained) and all(role.options.checkpointing for role in trained)


def search(
    workload: Workload,
    machine: Machine,
    accept: Callable[[Plan], object] = lambda plan: None,
) -> Plan:
    """The first plan that fits and is accepted; if none fits, the nearest.

    Args:
        accept: raises ConfigError if a plan cannot run for a reason other than memory.

    Raises:
        ConfigError: plans fit, but none was accepted: the error about the first.
    """
    refused: ConfigError | None = None
    nearest: dict[str, Plan] = {}
    again = workload.recomputing()
    tried = [workload, again] if again != workload else [workload]
    for plan in (plan for one in tried for plan in _plans(one, machine)):
        if not plan.fits:
            before = nearest.get(plan.kind, plan)
            nearest[plan.kind] = min(before, plan, key=lambda p: p.fullest.peak_bytes)
            continue
        try:
            accept(plan)
        except ConfigError as error:
            refused = refused or error
            continue
        return replace(plan, reasons=_reasons(nearest))
    if refused is not None:
        raise refused
    return replace(min(nearest.values(), key=lambda p: p.fullest.peak_bytes), reasons=_reasons(nearest))


def _reasons(nearest: dict[str, Plan]) -> tuple[str, ...]:
    return tuple(
        f"{kind}: needs {p.fullest.peak_bytes / 1e9:.4g} GB a device, {p.machine.usable_bytes / 1e9:.4g} GB are usable"
        for kind, p in nearest.items()
    )


def _plans(workload: Workload, machine: Machine) -> Iterator[Plan]:
    replicas = workload.generator_replicas
    whole, generating = Layout(), Layout(dp=replicas)
    trained, scored, sampled = (workload.of_use(use) for use in ALL_USES)
    least = max((role.options.least_zero_stage for role in trained), default=0)
    tokens = workload.batch_size * workload.sequence_tokens
    useful = min(math.ceil(tokens / workload.micro_batch_tokens), workload.batch_size) if trained else 1
    colocated = _plan(workload, machine, "colocated", Layout(zero_stage=least), whole, generating)

    on_cpu = machine.device == "cpu"
    few = not on_cpu and (useful == 1 or machine.num_devices < workload.num_models)
    if few:
        yield colocated
    score = generate = whole
    if not on_cpu:
        score = _least(workload, scored, machine, chain(_replicas(scored, machine), _zero3_shards(workload, machine)))
        by_tensor = (layout for layout in _replicas(sampled, machine) if layout.pp == 1)
        generate = _least(workload, sampled, machine, by_tensor)
    alone = [score.tp] * score.pp * score.dp * len(scored) + [generate.tp] * len(sampled) * replicas
    alone = [] if on_cpu else alone
    generate = replace(generate, dp=replicas)
    if not trained and sum(alone) <= machine.num_devices:
        yield _plan(workload, machine, "colocated" if on_cpu else "separate", whole, score, generate)
    for tp, pp in _splits(trained, machine):
        most = _groups(machine, tp, alone) // (1 if on_cpu else len(trained)) // pp
        most = min(most, workload.batch_size, MAX_RANKS // (tp * pp))
        # A single replica has the most memory per device and needs the fewest other resources.
        for dp in dict.fromkeys((min(useful, most), most, min(1, most))) if most else ():
            for stage in _zero_stages(least, dp, split=tp * pp > 1):
                layout = Layout(zero_stage=stage, tp=tp, pp=pp, dp=dp)
                yield _plan(workload, machine, "colocated" if on_cpu else "separate", layout, score, generate)
    if not on_cpu and not few:
        yield colocated


def _plan(
    workload: Workload, machine: Machine, placement: Placement, train: Layout, score: Layout, generate: Layout
) -> Plan:
    layouts: dict[Use, Layout] = dict(zip(ALL_USES, (train, score, generate), strict=True))
    plans = tuple(
        RolePlan(role, layouts[role.use], workload.memory(role, layouts[role.use])) for role in workload.roles
    )
    return Plan(placement, plans, tuple(_shared(plans, workload, machine, placement)), layouts, workload, machine)


def _shared(plans: Sequence[RolePlan], workload: Workload, machine: Machine, placement: Placement) -> Iterator[Group]:
    """The groups of ranks that may share a device."""
    if machine.device == "cpu":
        # Every device has one rank of each model, or more if there are more ranks than devices.
        yield Group(tuple(p for p in plans for _ in range(math.ceil(p.layout.num_devices / machine.num_devices))))
        return
    if placement == "separate":
        yield from (Group((p,)) for p in plans)
        return
    ranks = [p for p in plans for _ in range(p.layout.num_devices)]
    ranks.sort(key=lambda p: p.memory.total, reverse=True)
    share = math.ceil(workload.num_models / machine.num_devices)
    # Ray chooses which ranks share a device: the largest may share one, and the generator may be on another.
    for first in range(0, len(ranks), share):
        yield Group(tuple(ranks[first : first + share]), workload.generator_sleeps and machine.num_devices == 1)


def _least(workload: Workload, roles: Sequence[Role], machine: Machine, layouts: Iterable[Layout]) -> Layout:
    """The first of `layouts` with which every role fits alone on its devices; if none does, the whole model."""
    for layout in layouts if roles else ():
        if all(workload.memory(role, layout).total <= machine.usable_bytes for role in roles):
            return layout
    return Layout()


def _replicas(roles: Sequence[Role], machine: Machine) -> Iterator[Layout]:
    """One copy of each model, split further and further."""
    yield from (Layout(tp=tp, pp=pp) for tp, pp in _splits(roles, machine))


def _zero3_shards(workload: Workload, machine: Machine) -> Iterator[Layout]:
    """ZeRO-3 over more and more devices, each with its own rows."""
    most = min(machine.num_devices, workload.rollout_size, MAX_RANKS)
    yield from (Layout(zero_stage=3, dp=2**n) for n in range(1, most.bit_length()))


def _splits(roles: Sequence[Role], machine: Machine) -> Iterator[tuple[int, int]]:
    """(tensor-parallel degree, pipeline stages) that all of `roles` support for a replica: whole first, then by
    increasing communication.
    """
    if not roles:
        return
    yield 1, 1
    if any(_is_whole(role) for role in roles):
        return
    node = machine.devices_per_node or machine.num_devices
    # This takes seconds of imports, so it runs only if whole replicas do not fit.
    by_tensor, by_layers = map(all, zip(*(_can_shard(role.model) for role in roles), strict=True))
    heads = math.gcd(*(size for role in roles for size in (role.shape.num_heads, role.shape.num_kv_heads)))
    layers = min(role.shape.num_layers for role in roles)
    tensor = [tp for tp in DEGREES if tp == 1 or (by_tensor and heads % tp == 0 and tp <= node)]
    stages = [pp for pp in DEGREES if pp == 1 or (by_layers and pp <= layers)]
    yield from ((tp, pp) for pp in stages for tp in tensor if tp * pp > 1)


def _is_whole(role: Role) -> bool:
    # A frozen trunk is computed whole, once per rollout; adapters and offload to disk work only with ZeRO.
    options = role.options
    adapted = role.top_layers is not None or options.lora_rank is not None
    return role.in_one_piece or adapted or options.least_zero_stage == 3


@cache
def _can_shard(model: str | None) -> tuple[bool, bool]:
    if model is None:
        return True, True
    from xray_runtime.engines.make import can_shard

    return can_shard(model)


def _groups(machine: Machine, tp: int, others: list[int]) -> int:
    """Number of groups of `tp` devices on one node that remain after each of `others` takes its devices on one node."""
    node = machine.devices_per_node or machine.num_devices
    free = [node] * (machine.num_devices // node) + [machine.num_devices % node]
    for size in sorted(others, reverse=True):
        # Choose the node that loses the fewest groups, and among those the fullest.
        open_to = [i for i, left in enumerate(free) if left >= size]
        if not open_to:
            return 0
        free[min(open_to, key=lambda i: (free[i] // tp - (free[i] - size) // tp, free[i]))] -= size
    return sum(left // tp for left in free)


def _zero_stages(least: int, dp: int, *, split: bool) -> range:
    if dp == 1:
        return range(least, least + 1)
    return range(least, 3 if split else 4)
