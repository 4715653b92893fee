"""Threads of models that train alone and side by side: sharing them, how long waiting ones spin, and MKL's mode.

    python -m benchmarks.threads [--spins 0 500 2000 10000] [--rounds 5]
    python -m benchmarks.threads --spins 500 --mkl OFF AUTO

A shared critic is one model at work, a separate one two. `all` gives each model every thread, `share` its share. Each
is measured alone and beside another process that keeps one core busy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from benchmarks.layouts import CONFIG, global_batches, make_model
from benchmarks.machine import line, machine, ratio, spread, start_ray, table
from xray_runtime.config.base import FreshBase
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.rows import Rows, num_response_tokens
from xray_runtime.models.objectives import Objective
from xray_runtime.models.ppo_objectives import CriticObjective, PPOObjective
from xray_runtime.workers.learner import Learner
from xray_runtime.workers.libraries import REPRODUCIBLE, SPIN_COUNT
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.workhorse import RankInfo

BASE = FreshBase(
    vocab_size=2048,
    hidden_size=160,
    num_layers=4,
    num_heads=5,
    num_kv_heads=5,
    intermediate_size=448,
    max_positions=128,
)
"""The quickstart's model."""
NUM_ROWS, NUM_STEPS = 32, 8
"""The quickstart's minibatch, and the optimizer steps of one of its iterations."""


class Timed(Learner):
    """A Learner whose waiting threads look for work `spin` times, and whose MKL is in the mode `mkl`."""

    def __init__(self, runtime: RuntimeConfig, spin: int, mkl: str) -> None:
        super().__init__(runtime)
        os.environ |= {"GOMP_SPINCOUNT": str(spin), "MKL_CBWR": mkl}


Variant = tuple[int, str]
"""Spins, and MKL's mode."""


def start(variant: Variant, runtime: RuntimeConfig, model: Path) -> list[Any]:
    """A policy with a value head, and a critic, each in a process of its own."""
    objectives: dict[str, Objective] = {"policy": PPOObjective(CONFIG), "critic": CriticObjective(CONFIG)}
    learners = [ray.remote(Timed).options(num_cpus=0).remote(runtime, *variant) for _ in objectives]
    builds = []
    for learner, (role, objective) in zip(learners, objectives.items(), strict=True):
        host, port = ray.get(learner.rendezvous.remote())
        spec = ModelSpec(model, objective, training=CONFIG, new_head=True)
        builds.append(learner.build.remote(spec, RankInfo(role, 0, 0, 1, host, port, None)))
    ray.get(builds)
    return learners


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Another process that computes all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seconds(learners: list[Any], batches: list[Rows], at_once: int) -> float:
    """Seconds of the optimizer steps of one iteration, on all `learners` at the same time."""
    begin = time.perf_counter()
    for number in range(NUM_STEPS):
        rows = batches[number % len(batches)]
        tokens = float(num_response_tokens(rows))
        ray.get([learner.train.remote(rows, {"tokens": tokens}, CONFIG.lr, at_once) for learner in learners])
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", type=int, nargs="+", default=[0, SPIN_COUNT])
    parser.add_argument("--mkl", nargs="+", default=[REPRODUCIBLE])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    runtime = RuntimeConfig(device="cpu", threads=options.threads)
    print(f"{machine()}; {options.threads} threads, {options.rounds} rounds of {NUM_STEPS} steps\n")
    start_ray(1)
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), BASE)
        batches = global_batches(model, num_rows=NUM_ROWS)
        variants: list[Variant] = list(itertools.product(options.spins, options.mkl))
        learners = {variant: start(variant, runtime, model) for variant in variants}
        ways = [(1, "all"), (2, "all"), (2, "share")]
        found: dict[tuple[str, int, Variant, str], list[float]] = {}
        for beside, disturbance in (("nothing", contextlib.nullcontext()), ("a busy process", busy_core())):
            with disturbance:
                # In turns, so that whatever else the machine does meets all of them; the first round does not count.
                for number in range(options.rounds + 1):
                    for (count, threads), variant in itertools.product(ways, variants):
                        at_once = count if threads == "share" else 1
                        taken = seconds(learners[variant][:count], batches, at_once)
                        if number:
                            found.setdefault((beside, count, variant, threads), []).append(taken)
    ray.shutdown()
    table(("beside", "critic", "spins", "MKL", "threads each", "updates of an iteration", "÷ first"), [])
    for (beside, count, (spin, mkl), threads), values in found.items():
        first = found[beside, count, variants[0], "all"]
        critic = "shared" if count == 1 else "separate"
        line((beside, critic, spin, mkl, threads, spread(values, " s"), ratio(values, first)))


if __name__ == "__main__":
    main()
