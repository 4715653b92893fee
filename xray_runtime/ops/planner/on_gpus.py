"""Candidate plans on GPUs, the fastest first, by the memory model and the cost model.

    trained    whole replicas under ZeRO 0 to 3; split over 2, 4, 8 GPUs of a node by tensor, and in 2, 4, 8 pipeline
               stages, under ZeRO 0 to 2; passes of as many tokens as fit; activations kept or recomputed
    frozen     a copy on every GPU, split by tensor, or sharded by ZeRO-3
    sampled    replicas, each split by tensor over 1 to 8 GPUs of a node, and the size of their KV cache
    colocated  every model on all GPUs; all awake, the generator asleep while the others work, or each in turn
    separate   GPUs of its own for every model: the trained ones share what the others leave

Seconds of the phases add up, or with a lag and separate GPUs those of the longer side count (`plan.overlapped`), so
each use has its own list of choices, and a plan is one of each. Ranks share the tokens of rows, and optimizer states
are offloaded, which is always slower, only where nothing fits without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.engines.roles import ALL_USES, Use
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.ops.planner.cost import (
    generate_seconds,
    iteration_seconds,
    score_seconds,
    sleep_seconds,
    sync_seconds,
    update_seconds,
)
from xray_runtime.ops.planner.memory import Layout
from xray_runtime.ops.planner.plan import NOTHING, Placement, Plan, Sleeps, UseMemory, overlapped, peak_bytes, plan_of
from xray_runtime.ops.planner.splits import (
    DEGREES,
    MAX_RANKS,
    groups,
    shared_rows,
    splits,
    trained_layouts,
    zero3_shards,
)
from xray_runtime.ops.planner.workload import PlannedRole, Workload

CACHE_SCALES = (1, 4, 8, 16, 32)
MAX_PASS_TOKENS = 32_768

WORTH_SPLITTING = 1.25
"""A split generator must be faster by more than this: the cost model is no more exact, and vLLM's all-reduce over GPUs
that other models share is NCCL's plain one."""


@dataclass(frozen=True)
class Choice:
    """One way to run the models of one use."""

    layout: Layout
    seconds: float = 0.0
    asleep_seconds: float = 0.0
    """Seconds to free the memory and to restore it."""
    sync_seconds: float = 0.0
    """Those of `seconds` for which the generator waits."""
    held: UseMemory = NOTHING
    """All models of the use or, if separate, the total of the largest."""
    micro_batch_tokens: int = 0
    checkpointing: bool = False
    cache_scale: int = 4


Candidate = tuple[float, Sleeps, Choice, Choice, Choice]
"""(seconds by which candidates are ranked, sleeps, trained, frozen, sampled)."""


def plans(workload: Workload, machine: Machine) -> Iterator[Plan]:
    """Plans that fit, the fastest first; the nearest of each placement where none does."""
    for shared in (workload, *shared_rows(workload)):
        yield from _plans(shared, machine)
    if "offload" in workload.open_choices:
        yield from _plans(workload.with_options(offload=True), machine)


def _plans(workload: Workload, machine: Machine) -> Iterator[Plan]:
    placements: list[Placement] = ["colocated", "separate"] if workload.num_models > 1 else ["separate"]
    search = _Search(workload, machine)
    # All models on all GPUs are nearly always the fastest. The rest is computed only if that is refused.
    for fewer in (False, True):
        fitting, nearest = [], []
        for placement in placements:
            candidates = search.shared(fewer) if placement == "colocated" else search.separate(fewer)
            fits, least = search.sorted_out(candidates, placement)
            fitting += [(candidate, placement) for candidate in fits]
            nearest += [(least, placement)] if least is not None else []
        fitting.sort(key=lambda option: option[0][0])
        for candidate, placement in fitting or nearest:
            yield search.plan(candidate, placement)
        if not fitting:
            return


class _Search:
    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._workload, self._machine = workload, machine
        self._trained, self._frozen, self._sampled = map(workload.of_use, ALL_USES)
        self._variants = [workload.with_options(checkpointing=True)]
        if not all(role.options.checkpointing for role in self._trained):
            self._variants.insert(0, workload)
        # Every number of free GPUs asks for the same layouts.
        self._choices_of = cache(lambda layout, shared: tuple(self._trained_choices(layout, shared=shared)))

    def plan(self, candidate: Candidate, placement: Placement) -> Plan:
        """The plan of a candidate."""
        _, (generator, trainer), trained, frozen, sampled = candidate
        chosen = replace(
            self._workload,
            micro_batch_tokens=trained.micro_batch_tokens or self._workload.micro_batch_tokens,
            generator_sleeps=generator,
            trainer_sleeps=trainer,
            cache_scale=sampled.cache_scale,
        )
        chosen = chosen.with_options(checkpointing=True) if trained.checkpointing else chosen
        layouts: dict[Use, Layout] = {"trained": trained.layout, "frozen": frozen.layout, "sampled": sampled.layout}
        seconds = iteration_seconds(chosen, layouts, self._machine, shared=placement == "colocated")
        return replace(plan_of(chosen, self._machine, placement, layouts), seconds=seconds)

    def sorted_out(
        self, candidates: Iterable[Candidate], placement: Placement
    ) -> tuple[list[Candidate], Candidate | None]:
        """(candidates that fit, the fastest of each distribution; the candidate that needs the least)."""
        usable, least, smallest = self._machine.usable_bytes, None, math.inf
        best: dict[object, Candidate] = {}
        for candidate in candidates:
            _, sleeps, trained, frozen, sampled = candidate
            if placement == "separate":
                peak = max(trained.held.total, frozen.held.total, sampled.held.total)
            else:
                peak = peak_bytes(sleeps, trained.held, frozen.held, sampled.held)
            if peak < smallest:
                least, smallest = candidate, peak
            if peak <= usable:
                key = (sleeps, _ranks(trained), _ranks(frozen), _ranks(sampled))
                if key not in best or candidate[0] < best[key][0]:
                    best[key] = candidate
        return list(best.values()), least

    def shared(self, fewer: bool) -> Iterator[Candidate]:
        """Candidates in which every model is on all GPUs."""
        count = self._machine.num_devices
        sleeps: list[Sleeps] = [(self._workload.generator_sleeps, self._workload.trainer_sleeps)]
        if "sleep" in self._workload.open_choices and self._sampled and len(self._workload.roles) > 1:
            sleeps = [(False, False), (True, False), *([(True, True)] if self._trained else [])]
        generating = list(self._generating(self._replica_counts(fewer), shared=True))
        scoring = list(self._scoring(count, fewer))
        for trained in self._training(lambda tp: groups(self._machine, tp, []), fewer=fewer, shared=True):
            for (generator, trainer), frozen, sampled in product(sleeps, scoring, generating):
                seconds = trained.seconds + frozen.seconds + sampled.seconds
                seconds += generator * sampled.asleep_seconds + trainer * trained.asleep_seconds
                yield _ranking(seconds, sampled), (generator, trainer), trained, frozen, sampled

    def separate(self, fewer: bool) -> Iterator[Candidate]:
        """Candidates in which every model has GPUs of its own."""
        workload, machine = self._workload, self._machine
        frozen = self._frozen_alone()
        awake: Sleeps = (workload.generator_sleeps, workload.trainer_sleeps)
        alone = [frozen.layout.tp] * frozen.layout.pp * frozen.layout.dp * len(self._frozen)
        known: dict[tuple[int, ...], list[Choice]] = {}
        # Sides that work at the same time should take equally long, which any share of the GPUs may bring.
        ahead = workload.samples_ahead
        shares = {machine.num_devices * n // 8 for n in (range(1, 8) if ahead else (1, 2, 4))}
        replicas = {
            tp: [count for count in counts if fewer or count == 1 or tp * count in shares]
            for tp, counts in self._replica_counts(fewer=True, shares=shares if ahead else ()).items()
        }
        for sampled in self._generating(replicas, shared=False):
            others = alone + [sampled.layout.tp] * sampled.layout.dp * len(self._sampled)
            if sum(others) > machine.num_devices or (self._trained and sum(others) == machine.num_devices):
                continue
            left = tuple(groups(machine, tp, others) // max(len(self._trained), 1) for tp in DEGREES)
            if left not in known:
                by_degree = dict(zip(DEGREES, left, strict=True))
                known[left] = list(self._training(by_degree.__getitem__, fewer=fewer, shared=False))
            for trained in known[left]:
                seconds = trained.seconds + frozen.seconds + sampled.seconds
                if ahead:
                    beside = seconds - sampled.seconds - trained.sync_seconds
                    seconds = trained.sync_seconds + overlapped(sampled.seconds, beside)
                yield _ranking(seconds, sampled), awake, trained, frozen, sampled

    def _training(self, groups_of: Callable[[int], int], *, fewer: bool, shared: bool) -> Iterator[Choice]:
        """Choices for the trained models. Args: groups_of: tensor-parallel degree → groups of GPUs that are free."""
        workload, machine = self._workload, self._machine
        if not self._trained:
            yield Choice(Layout())
            return
        front: dict[tuple[int, ...], list[Choice]] = {}
        for tp, pp in splits(self._trained, machine) if (sp := workload.sequence_parallel) == 1 else [(1, 1)]:
            most = min(groups_of(tp) // (pp * sp), workload.batch_size, MAX_RANKS // (tp * pp * sp))
            for dp in _counts(most, fewer):
                for layout in trained_layouts(workload, tp, pp, dp):
                    for choice in self._choices_of(layout, shared):
                        _keep(front.setdefault((tp, pp, dp) if fewer else (), []), choice)
        yield from (choice for choices in front.values() for choice in choices)

    def _trained_choices(self, layout: Layout, *, shared: bool) -> Iterator[Choice]:
        """Choices with one layout: passes of more and more tokens, until they do not fit."""
        machine = self._machine
        each = [0.0 for _ in self._trained]
        if self._sampled:
            each = [score_seconds(role, layout, self._workload, machine) for role in self._trained]
        for variant in self._variants:
            roles = variant.of_use("trained")
            for tokens in self._pass_tokens(layout.dp):
                one = replace(variant, micro_batch_tokens=tokens)
                needs = self._needs(one, roles, layout, shared)
                updates = [update_seconds(role, layout, one, machine) for role in roles]
                seconds = [update + score for update, score in zip(updates, each, strict=True)]
                total = sum(seconds) if shared else max(seconds)
                sync = sync_seconds(roles[0], layout, one, machine, shared=shared) if self._sampled else 0.0
                needs |= {"micro_batch_tokens": tokens, "sync_seconds": sync}
                again = all(role.options.checkpointing for role in roles)
                yield Choice(layout, total + sync, checkpointing=again, **needs)
                if needs["held"].total > machine.usable_bytes:
                    break

    def _pass_tokens(self, dp: int) -> list[int]:
        """Sizes of a training pass in tokens, the smallest first."""
        workload = self._workload
        if "micro_batch_tokens" not in workload.open_choices:
            return [workload.micro_batch_tokens]
        row, rows = max(workload.row_tokens, 16), math.ceil(workload.batch_size / dp)
        return [row * 2**n for n in range(12) if 2**n < 2 * rows and (n == 0 or row * 2**n <= MAX_PASS_TOKENS)]

    def _scoring(self, count: int, fewer: bool) -> Iterator[Choice]:
        """Choices for the frozen models on all GPUs."""
        if not self._frozen:
            yield Choice(Layout())
            return
        most = min(count, self._workload.rollout_size, MAX_RANKS)
        layouts = [
            Layout(tp=tp, dp=dp)
            for tp, pp in splits(self._frozen, self._machine)
            if pp == 1
            for dp in _counts(min(groups(self._machine, tp, []), most), fewer)
        ]
        layouts += [Layout(zero_stage=3, dp=dp) for dp in _counts(most, fewer) if dp > 1]
        yield from (self._frozen_choice(layout, shared=True) for layout in layouts)

    def _frozen_choice(self, layout: Layout, *, shared: bool) -> Choice:
        seconds = [score_seconds(role, layout, self._workload, self._machine) for role in self._frozen]
        needs = self._needs(self._workload, self._frozen, layout, shared)
        return Choice(layout, sum(seconds) if shared else max(seconds), **needs)

    def _frozen_alone(self) -> Choice:
        """The least split with which one copy of each frozen model fits alone on its GPUs; if none does, whole ones."""
        if not self._frozen:
            return Choice(Layout())
        replicas = (Layout(tp=tp, pp=pp) for tp, pp in splits(self._frozen, self._machine))
        for layout in (*replicas, *zero3_shards(self._workload, self._machine)):
            choice = self._frozen_choice(layout, shared=False)
            if choice.held.total <= self._machine.usable_bytes:
                return choice
        return self._frozen_choice(Layout(), shared=False)

    def _replica_counts(self, fewer: bool, shares: Iterable[int] = ()) -> Mapping[int, Sequence[int]]:
        """Tensor-parallel degree → numbers of replicas of the generator; also those that take these numbers of GPUs."""
        workload = self._workload
        free = "generator_replicas" in workload.open_choices
        replicas = {}
        for tp, pp in splits(self._sampled, self._machine):
            most = min(groups(self._machine, tp, []), workload.rollout_size)
            counts = [workload.generator_replicas]
            if free:
                counts = [*dict.fromkeys([*_counts(most, fewer), *(n // tp for n in shares if n >= tp)])]
            if pp == 1:
                replicas[tp] = [count for count in counts if count <= most]
        if self._sampled and not any(replicas.values()):
            raise ConfigError(
                f"runtime.generator_replicas: {workload.generator_replicas} is not allowed: must be at most "
                f"{self._machine.num_devices}, the number of GPUs, and at most the replies of a rollout"
            )
        return replicas

    def _generating(self, replicas: Mapping[int, Sequence[int]], *, shared: bool) -> Iterator[Choice]:
        """Choices for the generator."""
        if not self._sampled:
            yield Choice(Layout())
            return
        for tp, counts in replicas.items():
            for count, scale in product(counts, CACHE_SCALES):
                layout, one = Layout(tp=tp, dp=count), replace(self._workload, cache_scale=scale)
                seconds = sum(generate_seconds(role, layout, one, self._machine) for role in self._sampled)
                needs = self._needs(one, self._sampled, layout, shared)
                yield Choice(layout, seconds, cache_scale=scale, **needs)

    def _needs(self, workload: Workload, roles: Sequence[PlannedRole], layout: Layout, shared: bool) -> dict[str, Any]:
        """The fields of `Choice` about memory."""
        memory = [workload.memory(role, layout, shared=shared) for role in roles]
        held = UseMemory.of(memory) if shared else UseMemory(total=max(m.total for m in memory))
        return {"held": held, "asleep_seconds": sleep_seconds(workload, roles, memory, self._machine)}


def _ranking(seconds: float, sampled: Choice) -> float:
    return seconds * WORTH_SPLITTING if sampled.layout.tp > 1 else seconds


def _keep(front: list[Choice], choice: Choice) -> None:
    """Add `choice` unless another is as good in time and memory; remove those that it dominates."""

    def better(a: Choice, b: Choice) -> bool:
        return (
            a.seconds <= b.seconds
            and a.sync_seconds <= b.sync_seconds
            and a.held.total <= b.held.total
            and a.held.resident + a.held.syncing <= b.held.resident + b.held.syncing
            and a.held.resident <= b.held.resident
            and a.asleep_seconds <= b.asleep_seconds
        )

    if not any(better(other, choice) for other in front):
        front[:] = [other for other in front if not better(choice, other)] + [choice]


def _counts(most: int, fewer: bool) -> list[int]:
    """Numbers of replicas to try: the most, and with `fewer` the powers of two below."""
    lower = [2**n for n in range(most.bit_length()) if 2**n < most] if fewer else []
    return [most, *reversed(lower)] if most else []


def _ranks(choice: Choice) -> tuple[int, int, int]:
    return choice.layout.tp, choice.layout.pp, choice.layout.dp
