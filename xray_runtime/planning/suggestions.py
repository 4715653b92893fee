"""What to change where no plan fits: single changes, each of which was planned again and does fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from xray_runtime.planning.plan import MAX_DEVICES, least_count, make_plan
from xray_runtime.planning.workload import GIB, Machine, Workload

LORA_RANK = 16

Change = Literal["num_devices", "memory_gib", "lora_rank", "offload", "micro_batch_tokens", "sequence_tokens"]


@dataclass(frozen=True)
class Suggestion:
    """Set `change` to `value`, and a plan fits."""

    change: Change
    value: int
    text: str

    def apply(self, workload: Workload, machine: Machine) -> tuple[Workload, Machine]:
        """`workload` and `machine` after the change."""
        match self.change:
            case "num_devices":
                return workload, replace(machine, num_devices=self.value)
            case "memory_gib":
                return workload, replace(machine, memory_bytes=self.value * GIB)
            case "lora_rank":
                return workload.trained_with(lora_rank=self.value), machine
            case "offload":
                return workload.trained_with(offload=bool(self.value), least_zero_stage=1), machine
            case "micro_batch_tokens":
                return replace(workload, micro_batch_tokens=self.value), machine
            case "sequence_tokens":
                return workload.with_sequence(self.value), machine


def suggest(workload: Workload, machine: Machine) -> Iterator[Suggestion]:
    """Every kind of change that alone makes a plan fit, by as little as it takes."""

    def fits(change: Suggestion) -> bool:
        return make_plan(*change.apply(workload, machine)).fits

    def devices(n: int) -> Suggestion:
        return Suggestion("num_devices", n, f"{n} devices of this size instead of {machine.num_devices}")

    def memory(gib: int) -> Suggestion:
        return Suggestion("memory_gib", gib, f"{gib} GiB a device instead of {machine.memory_bytes / GIB:.3g}")

    def micro_batch(tokens: int) -> Suggestion:
        text = f"training passes of {tokens} tokens instead of {workload.micro_batch_tokens}; the result stays the same"
        return Suggestion("micro_batch_tokens", tokens, text)

    def sequence(tokens: int) -> Suggestion:
        text = f"sequences of {tokens} tokens instead of {workload.sequence_tokens}, one in a training pass"
        return Suggestion("sequence_tokens", tokens, text)

    least = least_count(lambda n: fits(devices(n)), machine.num_devices + 1, MAX_DEVICES)
    if least is not None:
        yield devices(least)
    now = math.floor(machine.memory_bytes / GIB)
    enough = 2 * math.ceil(make_plan(workload, machine).fullest.peak_bytes / GIB)
    least = least_count(lambda gib: fits(memory(gib)), now + 1, now + enough)
    if least is not None:
        yield memory(least)
    simple = [
        Suggestion("lora_rank", LORA_RANK, f"LoRA adapters of rank {LORA_RANK} instead of training all weights"),
        Suggestion("offload", 1, "optimizer states in host memory (ZeRO-Offload)"),
    ]
    yield from (change for change in simple if fits(change))
    longest = _most(lambda n: fits(micro_batch(n)), workload.sequence_tokens, workload.micro_batch_tokens - 1)
    if longest is not None:
        yield micro_batch(longest)
        return
    longest = _most(lambda n: fits(sequence(n)), 2, workload.sequence_tokens - 1)
    if longest is not None:
        yield sequence(longest)


def _most(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    below = least_count(lambda n: fits(high - n), 0, high - low)
    return None if below is None else high - below
