"""A learner's optimizer step in one process, without Ray: what threads give, and which operators take its time.

    python -m benchmarks.step [--size 1.6M] [--rows 16 32 64] [--repeat 20]

PPO with a shared critic on rows of some 20 tokens, with a Workhorse's settings. Ways take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.layouts import CONFIG, global_batches, make_model
from benchmarks.machine import gflop_per_second, machine, ratio, spread, table
from benchmarks.peers_work import SIZES
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.pool.libraries import KEEP_MEMORY, prepare_imports
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.workhorse import reserve_port
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.engines import threads
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.config import FreshBase

PROMPT, REPLY = (4, 14), (4, 17)
ONE, WHOLE, TWO = "one thread", "torch's two threads", "two micro-batches at a time"
WAYS = {ONE: 1, WHOLE: 2, TWO: 2}
"""Threads of the learner."""
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "optimizer": ("aten::_fused_adamw_", "aten::linalg_vector_norm", "Optimizer."),
}
"""Share of a step → how the names of its operators begin."""
SMALLEST = threads.SMALLEST


@contextlib.contextmanager
def computed(learner: Learner, way: str) -> Iterator[None]:
    """Steps are computed this way."""
    runtime = learner.runtime
    learner.runtime = runtime.model_copy(update={"threads": WAYS[way]})
    torch.set_num_threads(WAYS[way])
    threads.SMALLEST = SMALLEST if way == TWO else 2**62
    try:
        yield
    finally:
        learner.runtime, threads.SMALLEST = runtime, SMALLEST


def step(learner: Learner, rows: TextBatch) -> tuple[float, float]:
    """(seconds, processor seconds) of an optimizer step."""
    totals = StepTotals(tokens=float(rows.num_response_tokens()))
    start, used = time.perf_counter(), time.process_time()
    learner.train(rows, totals, CONFIG.lr)
    return time.perf_counter() - start, time.process_time() - used


def shares(learner: Learner, rows: TextBatch) -> tuple[dict[str, float], int]:
    """(kind of operators → its share of a step's time on one thread, operators of a step)."""
    steps = 5
    with computed(learner, ONE), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step(learner, rows)
    seconds: Counter[str] = Counter()
    count = 0
    for event in profiler.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "other operators, Python")
        seconds[kind] += event.self_cpu_time_total
        count += event.count * event.key.startswith("aten::")
    return {kind: taken / seconds.total() for kind, taken in seconds.items()}, round(count / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("1.6M", "18M"), default="1.6M")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    if not os.environ.keys() >= KEEP_MEMORY.keys():
        # torch and the C library read a Workhorse's settings when they are loaded.
        prepare_imports(threads=2)
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.step", *sys.argv[1:]], os.environ | KEEP_MEMORY)
    base = FreshBase(**SIZES[options.size].base)
    print(f"{machine()}; {gflop_per_second(base.hidden_size, base.intermediate_size, 1):.0f} GFLOP/s on one thread\n")
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", base)
        runtime = RuntimeConfig(device="cpu", threads=2)
        spec = ModelSpec(model, PPOObjective(CONFIG), training=CONFIG, new_head=True)
        learner = Learner(runtime)
        with contextlib.closing(reserve_port()) as port:
            learner.build(spec, RankInfo("policy", 0, 0, 1, "127.0.0.1", int(port.getsockname()[1]), None))
        report(learner, model, options.rows, options.repeat)


def report(learner: Learner, model: Path, counts: list[int], repeat: int) -> None:
    rows, taken = [], []
    for count in counts:
        batch = global_batches(model, 1, count, PROMPT, REPLY)[0]
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for number in range(repeat + 1):
            for way in WAYS:
                with computed(learner, way):
                    measured = step(learner, batch)
                if number:
                    found[way].append(measured)
        alone = [seconds for seconds, _ in found[ONE]]
        for way, steps in found.items():
            seconds = [taken for taken, _ in steps]
            used = 1e3 * statistics.median(used for _, used in steps)
            ms = spread([1e3 * taken for taken in seconds])
            rows.append((batch.num_tokens(), way, ms, f"{used:.0f}", ratio(alone, seconds)))
        kinds, operators = shares(learner, batch)
        taken.append((batch.num_tokens(), operators, *(f"{100 * kinds[kind]:.0f}" for kind in sorted(kinds))))
    table(["tokens", "computed by", "ms a step", "of the processor, ms", "one thread ÷ it"], rows)
    print()
    table(["tokens", "operators", *(f"{kind}, %" for kind in sorted(kinds))], taken)


if __name__ == "__main__":
    main()
