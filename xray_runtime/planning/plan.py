"""The planner: where each model of a PPO stage goes, and how it is spread there.

Placements, in the order they are tried; the first that fits is taken:

    colocated                   every device holds a whole copy of every model; ZeRO 0 to 2 for the trained ones
    separate                    each model has devices of its own; ZeRO 0 to 3, a generator on single devices
    colocated, in turn          as colocated, and the generator sleeps while the others work
    tensor-parallel generator   the generator is split over 2, 4, … devices of its own, the others share the rest under
                                ZeRO-3 (tensor and pipeline parallel where that is not enough)
    the same, in turn           both on all devices, the generator asleep while the others work

Within a placement the layout with the least communication that fits is taken: low ZeRO stages before high ones, keeping
activations before computing them again. A plain, deterministic search over at most a few hundred closed-form estimates.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from xray_runtime.planning.memory import Layout, Memory
from xray_runtime.planning.workload import Machine, Role, Workload

Placement = Literal["colocated", "separate", "tensor-parallel generator"]

DEGREES = (2, 4, 8, 16, 32, 64)
"""Tensor-parallel degrees of a generator."""
TRAINING_DEGREES = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp > 1]
WORK = {"train": 3, "generate": 3, "score": 1}
"""Time of a role a parameter, for sharing out spare devices: backward is twice forward, replies come token by token."""
MAX_DEVICES = 65_536
"""Most devices that are looked at."""


@dataclass(frozen=True)
class RolePlan:
    """One role's devices (the first `layout.num_devices` from `first_device` on), layout and memory on each of them."""

    role: Role
    layout: Layout
    memory: Memory
    first_device: int

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.layout.num_devices)


@dataclass(frozen=True)
class Group:
    """Roles that share devices `devices`."""

    roles: tuple[RolePlan, ...]
    devices: range
    in_turn: bool
    """The generator sleeps while the others work: only its process stays."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes needed on one device at one time. Each role is a process whose allocator keeps its own peak."""
        total = sum(plan.memory.total for plan in self.roles)
        if not self.in_turn:
            return total
        (generator,) = [plan.memory for plan in self.roles if plan.role.use == "generate"]
        generating = generator.total + sum(p.memory.resident for p in self.roles if p.role.use != "generate")
        return max(generating, total - generator.total + generator.process)

    def largest(self) -> tuple[RolePlan, str, int]:
        """(role, what for, bytes) of the largest single need."""
        needs = [(plan, f.name, getattr(plan.memory, f.name)) for plan in self.roles for f in fields(Memory)]
        return max(needs, key=lambda need: need[2])


@dataclass(frozen=True)
class Plan:
    """What was chosen, or, where nothing fits, what came nearest."""

    placement: Placement
    groups: tuple[Group, ...]
    machine: Machine
    reasons: tuple[str, ...]
    """Why not the placements tried before, one line each."""

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        return tuple(plan for group in self.groups for plan in group.roles)

    @property
    def fullest(self) -> Group:
        return max(self.groups, key=lambda group: group.peak_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest.peak_bytes <= self.machine.usable_bytes


def make_plan(workload: Workload, machine: Machine) -> Plan:
    """The first placement that fits; where none does, the one that comes nearest."""
    reasons: list[str] = []
    nearest: Plan | None = None
    for name, placement, groups in _placements(workload, machine):
        if isinstance(groups, str):
            reasons.append(f"{name}: {groups}")
            continue
        plan = Plan(placement, groups, machine, tuple(reasons))
        if plan.fits:
            return plan
        need = f"{plan.fullest.peak_bytes / 1e9:.3g} GB a device, {machine.usable_bytes / 1e9:.3g} GB are usable"
        reasons.append(f"{name}: needs {need}")
        if nearest is None or plan.fullest.peak_bytes < nearest.fullest.peak_bytes:
            nearest = plan
    assert nearest is not None
    return replace(nearest, reasons=tuple(reasons))


def _placements(workload: Workload, machine: Machine) -> Iterator[tuple[str, Placement, tuple[Group, ...] | str]]:
    roles, devices = workload.roles, machine.num_devices
    generator = tuple(role for role in roles if role.use == "generate")
    others = tuple(role for role in roles if role.use != "generate")
    solver = _Solver(workload, machine)

    together = _Party(roles, "whole")
    yield "colocated", "colocated", (solver.solve(together, devices),)
    yield "separate", "separate", solver.share_out([_Party((role,), "own") for role in roles])
    yield "colocated, in turn", "colocated", (solver.solve(replace(together, in_turn=True), devices),)
    if devices >= 2 and any(generator[0].shape.num_heads % tp == 0 for tp in DEGREES):
        name: Placement = "tensor-parallel generator"
        yield name, name, solver.share_out([_Party(generator, "split"), _Party(others, "sharded")])
        yield f"{name}, in turn", name, (solver.solve(_Party(roles, "sharded", in_turn=True), devices),)


@dataclass(frozen=True)
class _Party:
    """Roles that are to share devices, and how they may be laid out there."""

    roles: tuple[Role, ...]
    style: Literal["whole", "own", "split", "sharded"]
    in_turn: bool = False

    @property
    def least_devices(self) -> int:
        return 2 if self.style in ("split", "sharded") else 1

    @property
    def work(self) -> int:
        return sum(WORK[role.use] * role.shape.num_parameters for role in self.roles)


@dataclass(frozen=True)
class _Solver:
    workload: Workload
    machine: Machine

    def solve(self, party: _Party, devices: int) -> Group:
        """The first of the party's layouts that fits `devices` devices, or the one that comes nearest."""
        nearest: Group | None = None
        for layouts in self._layouts(party, devices):
            plans = [
                RolePlan(role, layout, self.workload.memory(role, layout), 0)
                for role, layout in zip(party.roles, layouts, strict=True)
            ]
            group = Group(tuple(plans), range(devices), party.in_turn)
            if group.peak_bytes <= self.machine.usable_bytes:
                return group
            if nearest is None or group.peak_bytes < nearest.peak_bytes:
                nearest = group
        assert nearest is not None
        return nearest

    def share_out(self, parties: list[_Party]) -> tuple[Group, ...] | str:
        """Devices for every party: the least it fits on, then spare ones to whoever has most work a device.

        Where the devices do not suffice: why.
        """
        least = [self._least(party) for party in parties]
        for party, n in zip(parties, least, strict=True):
            if n is None:
                return f"{', '.join(role.name for role in party.roles)} would not fit on any number of devices"
        counts = [n for n in least if n is not None]
        spare = self.machine.num_devices - sum(counts)
        if spare < 0:
            return f"needs {sum(counts)} devices, there are {self.machine.num_devices}"
        units = [n if party.style == "split" else 1 for n, party in zip(counts, parties, strict=True)]
        queue = [(-party.work / n, i) for i, (party, n) in enumerate(zip(parties, counts, strict=True))]
        heapq.heapify(queue)
        while queue:
            _, i = heapq.heappop(queue)
            if units[i] <= spare and counts[i] < self._useful(parties[i], units[i]):
                counts[i] += units[i]
                spare -= units[i]
                heapq.heappush(queue, (-parties[i].work / counts[i], i))
        groups, first = [], 0
        for party, count in zip(parties, counts, strict=True):
            group = self.solve(party, count)
            plans = tuple(replace(plan, first_device=first) for plan in group.roles)
            groups.append(replace(group, roles=plans, devices=range(first, first + count)))
            first += count
        return tuple(groups)

    def _least(self, party: _Party) -> int | None:
        def fits(devices: int) -> bool:
            return self.solve(party, devices).peak_bytes <= self.machine.usable_bytes

        return least_count(fits, party.least_devices, MAX_DEVICES)

    def _useful(self, party: _Party, unit: int) -> int:
        # More data-parallel ranks than sequences would have nothing to do.
        return unit * (self.workload.rollout_size if party.style == "split" else self.workload.batch_size)

    def _layouts(self, party: _Party, devices: int) -> Iterator[list[Layout]]:
        """A layout for each role of the party, least communication first."""
        batch, rollout = self.workload.batch_size, self.workload.rollout_size
        least = max(role.options.least_zero_stage for role in party.roles)
        stages = [stage for stage in _stages(party.style, devices) if stage >= least] or [least]
        training = [Layout(zero_stage=stage, dp=min(devices, batch)) for stage in stages]
        training += [replace(layout, checkpointing=True) for layout in training]
        if party.style == "sharded":
            degrees = [(tp, pp) for tp, pp in TRAINING_DEGREES if tp * pp <= devices]
            training += [_model_parallel(tp, pp, devices, batch, least) for tp, pp in degrees]
        for trained in training:
            sharded = trained.zero_stage == 3 or party.style == "sharded"
            scored = Layout(zero_stage=3 if sharded else 0, dp=min(devices, rollout))
            for tp in self._degrees(party, devices):
                generating = Layout(tp=tp, dp=min(devices // tp, rollout))
                by_use = {"train": trained, "score": scored, "generate": generating}
                layouts = [by_use[role.use] for role in party.roles]
                if all(_possible(role, layout) for role, layout in zip(party.roles, layouts, strict=True)):
                    yield layouts

    def _degrees(self, party: _Party, devices: int) -> list[int]:
        generators = [role for role in party.roles if role.use == "generate"]
        if not generators or party.style in ("whole", "own"):
            return [1]
        return [tp for tp in DEGREES if tp <= devices]


def _stages(style: str, devices: int) -> tuple[int, ...]:
    if devices == 1:
        return (0,)
    return {"whole": (0, 1, 2), "own": (0, 1, 2, 3), "split": (0,), "sharded": (3,)}[style]


def _model_parallel(tp: int, pp: int, devices: int, batch: int, least: int) -> Layout:
    dp = min(devices // (tp * pp), batch)
    # What is cut goes with ZeRO-2 at most.
    return Layout(zero_stage=max(2 if dp > 1 else 0, least), tp=tp, pp=pp, dp=dp, checkpointing=True)


def _possible(role: Role, layout: Layout) -> bool:
    layers = role.shape.num_layers if role.top_layers is None else role.top_layers
    whole = role.options.lora_rank is not None or role.options.least_zero_stage == 3
    if role.use == "train" and whole and layout.tp * layout.pp > 1:
        return False
    return role.shape.num_heads % layout.tp == 0 and layers >= layout.pp


def least_count(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least n in [low, high] that fits, where all above one that fits do too; None: not even `high`."""
    if low > high or not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
