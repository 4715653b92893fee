"""The planner of a stage: where each model goes, and how it is spread there; for `xray plan` and `auto` alike.

Only layouts that Workhorses have and a config can say. For what is trained the first of these that fits:

    ZeRO 0 to 3         over whole replicas
    tensor parallel     a replica split over 2, 4, 8 devices of one node, ZeRO 0 to 2 over replicas
    and pipeline        in 2, 4, 8 stages, each on one device or split again

The last two are for what ZeRO-3 cannot do: it shards over no more ranks than a step has rows, and each holds all
activations of its pass. What is frozen is cut only as far as one copy needs it, or, where it cannot be cut so far,
shared out by ZeRO-3; the generator is cut by tensor alone.
Placements:

    colocated   one rank a model, all models sharing the devices; on CPU as many ranks as are of use
    separate    devices of its own for each frozen model and the generator; the trained ones share out the rest

As many replicas are of use as a step has micro-batches; where that does not fit, all devices may be taken. Where
nothing fits, all of it is tried again with activations computed again in the backward pass: the same bits, a third more
work. A plain, deterministic search over a few hundred closed-form estimates.
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
"""Most devices that are looked at."""
MAX_RANKS = 1024
ALL_USES: tuple[Use, ...] = get_args(Use)
CUTS = (1, 2, 4, 8)
"""Tensor-parallel degrees and numbers of pipeline stages."""

Placement = Literal["colocated", "separate"]


@dataclass(frozen=True)
class RolePlan:
    """One role's layout, and its memory on each of its devices."""

    role: Role
    layout: Layout
    memory: Memory


@dataclass(frozen=True)
class Group:
    """Ranks that may meet on one device."""

    ranks: tuple[RolePlan, ...]
    in_turn: bool = False
    """The generator sleeps while the others work: only its process stays."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes needed at one time. Each rank is a process whose allocator keeps its own peak."""
        if not self.in_turn:
            return sum(rank.memory.total for rank in self.ranks)
        asleep = [rank.memory for rank in self.ranks if rank.role.use == "sampled"]
        others = [rank.memory for rank in self.ranks if rank.role.use != "sampled"]
        generating = sum(m.total for m in asleep) + sum(m.resident for m in others)
        return max(generating, sum(m.total for m in others) + sum(m.process for m in asleep))

    def largest(self) -> tuple[RolePlan, str, int]:
        """(role, what for, bytes) of the largest single need."""
        needs = [(rank, f.name, getattr(rank.memory, f.name)) for rank in self.ranks for f in fields(Memory)]
        return max(needs, key=lambda need: need[2])


@dataclass(frozen=True)
class Plan:
    """What was chosen, or, where nothing fits, what came nearest."""

    placement: Placement
    roles: tuple[RolePlan, ...]
    groups: tuple[Group, ...]
    """The fullest that devices can be."""
    layouts: Mapping[Use, Layout]
    """All roles with the same use share one."""
    workload: Workload
    machine: Machine
    reasons: tuple[str, ...] = ()
    """Why not what was tried before, one line for each kind of layout."""

    @property
    def fullest(self) -> Group:
        return max(self.groups, key=lambda group: group.peak_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest.peak_bytes <= self.machine.usable_bytes

    @property
    def kind(self) -> str:
        """In a word or two."""
        trained = self.layouts["trained"]
        cut = ", cut" if trained.tp * trained.pp > 1 else ""
        return self.placement + cut + (", recomputing" if self.recomputes else "")

    @property
    def recomputes(self) -> bool:
        """Whether activations of what is trained are computed again in the backward pass."""
        trained = [p.role for p in self.roles if p.role.use == "trained"]
        return bool(trained) and all(role.options.checkpointing for role in trained)


def search(
    workload: Workload,
    machine: Machine,
    accept: Callable[[Plan], object] = lambda plan: None,
) -> Plan:
    """The first plan that fits and is accepted; where none fits, the one that comes nearest.

    Args:
        accept: raises ConfigError where a plan cannot be carried out whatever its memory.

    Raises:
        ConfigError: there are plans that fit, and none was accepted; what was said of the first.
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
    few = not on_cpu and (useful == 1 or machine.num_devices < workload.most_alive)
    if few:
        yield colocated
    score = generate = whole
    if not on_cpu:
        score = _least(workload, scored, machine, chain(_replicas(scored, machine), _shared_out(workload, machine)))
        by_tensor = (layout for layout in _replicas(sampled, machine) if layout.pp == 1)
        generate = _least(workload, sampled, machine, by_tensor)
    alone = [score.tp] * score.pp * score.dp * len(scored) + [generate.tp] * len(sampled) * replicas
    alone = [] if on_cpu else alone
    generate = replace(generate, dp=replicas)
    if not trained and sum(alone) <= machine.num_devices:
        yield _plan(workload, machine, "colocated" if on_cpu else "separate", whole, score, generate)
    for tp, pp in _cuts(trained, machine):
        most = _groups(machine, tp, alone) // (1 if on_cpu else len(trained)) // pp
        most = min(most, workload.batch_size, MAX_RANKS // (tp * pp))
        # One alone holds most, and asks for least of what is not memory.
        for dp in dict.fromkeys((min(useful, most), most, min(1, most))) if most else ():
            for stage in _zero_stages(least, dp, cut=tp * pp > 1):
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
    """The ranks that may meet on a device."""
    if machine.device == "cpu":
        # Every device has one of each model, or more where there are more ranks than devices.
        yield Group(tuple(p for p in plans for _ in range(math.ceil(p.layout.num_devices / machine.num_devices))))
        return
    if placement == "separate":
        yield from (Group((p,)) for p in plans)
        return
    ranks = [p for p in plans for _ in range(p.layout.num_devices)]
    ranks.sort(key=lambda p: p.memory.total, reverse=True)
    share = math.ceil(workload.most_alive / machine.num_devices)
    # Who shares a device with whom is Ray's choice: the largest may meet, and the generator may be elsewhere.
    for first in range(0, len(ranks), share):
        yield Group(tuple(ranks[first : first + share]), workload.generator_sleeps and machine.num_devices == 1)


def _least(workload: Workload, roles: Sequence[Role], machine: Machine, layouts: Iterable[Layout]) -> Layout:
    """The first of `layouts` that every one of `roles` fits under, alone on its devices; where none does, no cut."""
    for layout in layouts if roles else ():
        if all(workload.memory(role, layout).total <= machine.usable_bytes for role in roles):
            return layout
    return Layout()


def _replicas(roles: Sequence[Role], machine: Machine) -> Iterator[Layout]:
    """One copy of each model, cut more and more."""
    yield from (Layout(tp=tp, pp=pp) for tp, pp in _cuts(roles, machine))


def _shared_out(workload: Workload, machine: Machine) -> Iterator[Layout]:
    """ZeRO-3 over more and more devices, each with rows of its own."""
    most = min(machine.num_devices, workload.rollout_size, MAX_RANKS)
    yield from (Layout(zero_stage=3, dp=2**n) for n in range(1, most.bit_length()))


def _cuts(roles: Sequence[Role], machine: Machine) -> Iterator[tuple[int, int]]:
    """(tensor-parallel degree, pipeline stages) of a replica that all of `roles` can have, least communication first;
    whole ones first of all.
    """
    if not roles:
        return
    yield 1, 1
    if any(_is_whole(role) for role in roles):
        return
    node = machine.devices_per_node or machine.num_devices
    # Only now: it takes seconds of imports, and what is small enough for one device never asks.
    by_tensor, by_layers = map(all, zip(*(_can_shard(role.model) for role in roles), strict=True))
    heads = math.gcd(*(size for role in roles for size in (role.shape.num_heads, role.shape.num_kv_heads)))
    layers = min(role.shape.num_layers for role in roles)
    tensor = [tp for tp in CUTS if tp == 1 or (by_tensor and heads % tp == 0 and tp <= node)]
    stages = [pp for pp in CUTS if pp == 1 or (by_layers and pp <= layers)]
    yield from ((tp, pp) for pp in stages for tp in tensor if tp * pp > 1)


def _is_whole(role: Role) -> bool:
    # A frozen trunk is computed once a rollout, in one piece; adapters and what lies on disk go with ZeRO alone.
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
    """How many times `tp` devices of one node are left when others have taken theirs: so many of one node each."""
    node = machine.devices_per_node or machine.num_devices
    free = [node] * (machine.num_devices // node) + [machine.num_devices % node]
    for size in sorted(others, reverse=True):
        # Where the fewest groups are lost, and there on the fullest node.
        open_to = [i for i, left in enumerate(free) if left >= size]
        if not open_to:
            return 0
        free[min(open_to, key=lambda i: (free[i] // tp - (free[i] - size) // tp, free[i]))] -= size
    return sum(left // tp for left in free)


def _zero_stages(least: int, dp: int, *, cut: bool) -> range:
    if dp == 1:
        return range(least, least + 1)
    return range(least, 3 if cut else 4)
