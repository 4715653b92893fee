"""Helpers for every benchmark: the machine's name for the record, repeated timing, tables, a local Ray."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

REPEATS = 5
MIB = 2**20


def machine() -> str:
    """The kind of machine, without its name."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return f"{cores}-core CPU ({platform.machine()}), {device}, load {load:.1f} at the start"


def times(work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Seconds of each of `repeats` runs, after one that does not count."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def spread(values: Iterable[float], unit: str = "", digits: int = 3) -> str:
    """Median, with the smallest and the largest value: how far to trust it."""
    known = sorted(values)
    return f"{statistics.median(known):.{digits}g} ({known[0]:.{digits}g} to {known[-1]:.{digits}g}){unit}"


def ratio(values: Sequence[float], reference: Sequence[float]) -> str:
    """`values` over `reference`, of medians."""
    return f"{statistics.median(values) / statistics.median(reference):.3g}×"


def gflop_per_second(inputs: int, outputs: int, threads: int, tokens: int = 1024) -> float:
    """The rate of a float32 product of `tokens` rows with a matrix, the best of several."""
    import torch

    torch.set_num_threads(threads)
    states, matrix = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    seconds = times(lambda: [torch.nn.functional.linear(states, matrix) for _ in range(50)])
    return 50 * 2e-9 * states.numel() * outputs / min(seconds)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        line(row)


def line(row: Sequence[object]) -> None:
    """Print a line of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


def start_ray(num_cpus: int) -> None:
    """A local Ray without output."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "xray"}
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
