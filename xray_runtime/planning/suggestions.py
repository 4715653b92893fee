"""What to change where no plan fits: single changes, each of which was planned again and does fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import validate
from xray_runtime.config.validation import ConfigError
from xray_runtime.planning.auto import left_open, section
from xray_runtime.planning.memory import Options
from xray_runtime.planning.plan import MAX_DEVICES, Plan
from xray_runtime.planning.workload import GIB, Machine, Workload, from_parameters

LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is asked for beside what is written; None and False leave that as it is."""

    lora_rank: int | None = None
    offload: bool = False
    """Optimizer states in host memory."""
    generator_sleeps: bool = False
    micro_batch_tokens: int | None = None

    def of_config(self, config: LifecycleConfig) -> LifecycleConfig:
        """`config` with these changes everywhere and all layouts left to choose. Raises ConfigError."""
        data = left_open(config)
        engine: dict[str, Any] = {"offload": "cpu", "nvme_path": None} if self.offload else {}
        if self.micro_batch_tokens is not None:
            engine["micro_batch_tokens"] = self.micro_batch_tokens
        for path in config.engines:
            section(data, path).update(engine)
        if self.lora_rank is not None:
            for path in config.trained:
                section(data, path)["lora"] = {"rank": self.lora_rank}
        data["runtime"]["generator_sleeps"] |= self.generator_sleeps
        return validate(data)

    def of_parameters(self, count: float, sequence_tokens: int) -> Workload:
        """Models of `count` parameters with these changes."""
        options = Options(lora_rank=self.lora_rank, offload=self.offload, least_zero_stage=int(self.offload))
        workload = from_parameters(count, sequence_tokens, options)
        tokens = self.micro_batch_tokens or workload.micro_batch_tokens
        return replace(workload, micro_batch_tokens=tokens, generator_sleeps=self.generator_sleeps)


@dataclass(frozen=True)
class Suggestion:
    """Set `change` to `value`, and a plan fits."""

    change: str
    """A field of `Changes`, `num_devices` or `memory_gib`."""
    value: int
    text: str
    changes: Changes
    machine: Machine


Planner = Callable[[Changes, Machine], Plan]


def suggest(plan: Planner, changes: Changes, nearest: Plan) -> Iterator[Suggestion]:
    """Every kind of change that alone makes a plan fit, by as little as it takes.

    Args:
        plan: plans the subject, with changes, for a machine; raises ConfigError where it does not allow them.
        nearest: what it came to with `changes`.
    """
    machine, workload = nearest.machine, nearest.workload

    def fits(suggestion: Suggestion) -> bool:
        try:
            return plan(suggestion.changes, suggestion.machine).fits
        except ConfigError:
            return False

    def devices(n: int) -> Suggestion:
        text = f"{n} devices of this size instead of {machine.num_devices}"
        return Suggestion("num_devices", n, text, changes, replace(machine, num_devices=n))

    def memory(gib: int) -> Suggestion:
        text = f"{gib} GiB a device instead of {machine.memory_bytes / GIB:.3g}"
        return Suggestion("memory_gib", gib, text, changes, replace(machine, memory_bytes=gib * GIB))

    def changed(text: str, **change: Any) -> Suggestion:
        [(name, value)] = change.items()
        return Suggestion(name, int(value), text, replace(changes, **change), machine)

    def narrower(by: int) -> Suggestion:
        tokens = workload.micro_batch_tokens - by
        text = f"training passes of {tokens} tokens instead of {workload.micro_batch_tokens}; the result stays the same"
        return changed(text, micro_batch_tokens=tokens)

    enough = 2 * math.ceil(nearest.fullest.peak_bytes / GIB)
    now = math.floor(machine.memory_bytes / GIB)
    # One sequence is the least of a pass, and 16 tokens the least that a config takes.
    most = workload.micro_batch_tokens - max(workload.sequence_tokens, 16)
    for suggestion, low, high in (
        (devices, machine.num_devices + 1, MAX_DEVICES),
        (memory, now + 1, now + enough),
        (narrower, 1, most),
    ):
        least = _least(suggestion, fits, low, high)
        if least is not None:
            yield least
    simple = [
        changed("a generator that gives its memory back while the others work", generator_sleeps=True),
        changed(f"LoRA adapters of rank {LORA_RANK} instead of training all weights", lora_rank=LORA_RANK),
        changed("optimizer states in host memory (ZeRO-Offload)", offload=True),
    ]
    yield from (suggestion for suggestion in simple if fits(suggestion))


def _least(
    suggestion: Callable[[int], Suggestion], fits: Callable[[Suggestion], bool], low: int, high: int
) -> Suggestion | None:
    """That of the least n in [low, high] which fits, where all above it do too; None: not even `high`."""
    if low > high or not fits(suggestion(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(suggestion(middle)) else (middle + 1, high)
    return suggestion(low)
