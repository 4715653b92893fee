"""A plan of a stage: placement and layout of each model, its memory, and the seconds of an iteration.

Placements:

    colocated   the models share devices: on GPUs rank r of every model is on GPU r, on CPU ranks go where there is room
    separate    every model has devices of its own
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.engines.roles import ALL_USES, Use
from xray_runtime.ops.planner.memory import HELD_IN_A_PASS, Layout, Memory
from xray_runtime.ops.planner.workload import PlannedRole, Workload

Placement = Literal["colocated", "separate"]
MOST_TOKENS = 2**24
"""The longest sequence that is tried."""


@dataclass(frozen=True)
class RolePlan:
    """One role's layout, and its memory on one of its devices."""

    role: PlannedRole
    layout: Layout
    memory: Memory

    @property
    def layout_text(self) -> str:
        """Its layout in a few words, such as `ZeRO-2 TP2 DP4 recompute`."""
        layout, options = self.layout, self.role.options
        words = [f"ZeRO-{layout.zero_stage}"] if self.role.use == "trained" or layout.zero_stage else []
        degrees = {"TP": layout.tp, "PP": layout.pp, "SP": layout.sp, "DP": layout.dp, "EP": layout.ep}
        words += [f"{name}{n}" for name, n in degrees.items() if n > 1]
        words += ["bf16"] if options.float32_sums else []
        words += [f"LoRA {options.lora_rank}"] if options.lora_rank else []
        words += ["offload"] if options.offload else []
        words += ["recompute"] if options.checkpointing else []
        return " ".join(words) or "whole"


@dataclass(frozen=True)
class UseMemory:
    """Bytes on one device of all models of one use."""

    total: int = 0
    resident: int = 0
    asleep: int = 0
    syncing: int = 0

    @classmethod
    def of(cls, memory: Sequence[Memory]) -> UseMemory:
        """Memory of models that may work at the same time."""
        names = [f.name for f in fields(cls)]
        return cls(**{name: sum(getattr(m, name) for m in memory) for name in names})


NOTHING = UseMemory()
Sleeps = tuple[bool, bool]
"""Whether (the generator, the trained models) sleep while others work."""


def peak_bytes(sleeps: Sleeps, trained: UseMemory, frozen: UseMemory, sampled: UseMemory) -> int:
    """Peak of a device that all models share, over the turns of an iteration (`methods/ppo/body.py`).

        sync        the generator's weights wake up beside awake trainers; its KV cache still sleeps
        generate    then trainers sleep, and the KV cache wakes up
        score, update    the generator sleeps, trainers are awake

    Each model is a process whose allocator keeps its peak, unless it releases memory after its turn.
    """
    generator, trainer = sleeps
    if not generator:
        return trained.total + frozen.total + sampled.total
    sync = trained.resident + trained.syncing + sampled.resident + sampled.syncing + frozen.resident
    generate = sampled.total + (trained.asleep if trainer else trained.resident) + frozen.resident
    return max(sync, generate, trained.total + frozen.total + sampled.asleep)


@dataclass(frozen=True)
class Group:
    """Ranks that may share one device."""

    ranks: tuple[RolePlan, ...]
    generator_sleeps: bool = False
    """The generator sleeps while the other models work: only its process stays."""
    trainer_sleeps: bool = False
    """Trained models sleep while the generator works."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory."""
        by_use = (UseMemory.of([p.memory for p in self.ranks if p.role.use == use]) for use in ALL_USES)
        return peak_bytes((self.generator_sleeps, self.trainer_sleeps), *by_use)

    def largest(self) -> tuple[RolePlan, str, int]:
        """(role, field of `Memory`, bytes) of the largest item."""
        names = (*HELD_IN_A_PASS, "loading", "syncing")
        return max(
            ((rank, name, getattr(rank.memory, name)) for rank in self.ranks for name in names),
            key=lambda need: need[2],
        )


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
    """With what the planner chose besides layouts."""
    machine: Machine
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase of an iteration → seconds by the cost model; empty on CPU."""
    reasons: tuple[str, ...] = ()
    """Why other candidates failed, one line per kind of layout."""

    @property
    def fullest(self) -> Group:
        return max(self.groups, key=lambda group: group.peak_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest.peak_bytes <= self.machine.usable_bytes

    @property
    def max_num_seqs(self) -> int | None:
        """Sequences that a replica of the generator samples at a time, for which its KV cache and its sampler's logits
        are planned; None without a generator."""
        return self.workload.running_sequences(self.layouts["sampled"]) if self.workload.of_use("sampled") else None

    @property
    def overlaps(self) -> bool:
        """Whether the generator samples while the other models score and learn; see `overlapped`."""
        return self.workload.samples_ahead and self.placement == "separate"

    @property
    def iteration_s(self) -> float:
        """Seconds of one iteration."""
        generate, others = self._beside_one_another
        total = sum(self.seconds.values())
        return total - generate - others + overlapped(generate, others) if self.overlaps else total

    @property
    def bottleneck(self) -> str | None:
        """The phase of an iteration that takes the longest; None on CPU. Where phases overlap, of the longer side."""
        generate, others = self._beside_one_another
        hidden = () if not self.overlaps else ("score", "update") if generate > others else ("generate",)
        return max((phase for phase in self.seconds if phase not in hidden), key=self.seconds.__getitem__, default=None)

    @property
    def _beside_one_another(self) -> tuple[float, float]:
        """Seconds of the generator, and of the models that score and learn."""
        return self.seconds.get("generate", 0.0), self.seconds.get("score", 0.0) + self.seconds.get("update", 0.0)

    @property
    def kind(self) -> str:
        """Short name of the kind of layout."""
        trained = self.layouts["trained"]
        split = ", split" if trained.tp * trained.pp > 1 else ", sharing rows" if trained.sp > 1 else ""
        again = ", recomputing" if self.recomputes else ""
        return self.placement + split + again + (", offloading" if self.offloads else "")

    @property
    def recomputes(self) -> bool:
        """Whether trained models recompute activations in the backward pass."""
        trained = self.workload.of_use("trained")
        return bool(trained) and all(role.options.checkpointing for role in trained)

    @property
    def offloads(self) -> bool:
        """Whether optimizer states of trained models are in host memory."""
        trained = self.workload.of_use("trained")
        return bool(trained) and all(role.options.offload for role in trained)


def overlapped(generate: float, others: float) -> float:
    """Seconds after `sync` of an iteration with a lag (`methods/ppo/body.py`), if the generator has GPUs of its own.

        sync      the generator waits: it has sampled all that it was asked for, or holds what it has not
        then      it samples one rollout, while the others score one that it sampled before and learn from it
        end       when both are done

    A larger lag also samples one rollout an iteration, and so hides no more. With `in_flight_updates` an iteration does
    not wait for its own slowest reply, but on average for as many. On GPUs that all share, the work adds up.
    """
    return max(generate, others)


def plan_of(workload: Workload, machine: Machine, placement: Placement, layouts: Mapping[Use, Layout]) -> Plan:
    """The plan with these layouts, without its seconds."""
    shared = placement == "colocated"
    memory = [workload.memory(role, layouts[role.use], shared=shared) for role in workload.roles]
    plans = tuple(RolePlan(role, layouts[role.use], m) for role, m in zip(workload.roles, memory, strict=True))
    return Plan(placement, plans, tuple(_shared(plans, workload, machine, placement)), layouts, workload, machine)


def most_row_tokens(plan: Plan) -> int:
    """Tokens of the longest sequence with which these layouts fit, up to `MOST_TOKENS`; 0: none does."""
    workload = plan.workload

    def fits(tokens: int) -> bool:
        reply = min(workload.response_tokens, tokens)
        other = replace(workload, sequence_tokens=tokens, response_tokens=reply)
        return plan_of(other, plan.machine, plan.placement, plan.layouts).fits

    return most_that_fits(MOST_TOKENS, fits)


def most_that_fits(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, if all below it do; 0: none does."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def _shared(plans: Sequence[RolePlan], workload: Workload, machine: Machine, placement: Placement) -> Iterator[Group]:
    """The groups of ranks that may share a device."""
    if machine.device == "cpu":
        # Every device has one rank of each model, or more if there are more ranks than devices.
        yield Group(tuple(p for p in plans for _ in range(math.ceil(p.layout.num_devices / machine.num_devices))))
    elif placement == "separate":
        yield from (Group((p,)) for p in plans)
    else:
        # The first GPU has a rank of every model.
        yield Group(tuple(plans), workload.generator_sleeps, workload.trainer_sleeps)
