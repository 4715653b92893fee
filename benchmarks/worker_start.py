"""CPU time and memory of a worker that is forked from a process with its libraries, beside one that imports them.

    python -m benchmarks.worker_start [--workers 4]

Each worker is started by Ray, loads its libraries and stops there. The two kinds of Ray take turns. Memory is what the
process shares with nobody (USS).
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any
from unittest import mock

import psutil
import ray

from benchmarks.machine import machine, table
from xray.deployments import local_ray
from xray_runtime.config.engines import GeneratorConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.processes import QUIET
from xray_runtime.workers.generator import Generator
from xray_runtime.workers.learner import Learner
from xray_runtime.workers.libraries import TRAINING, VLLM
from xray_runtime.workers.pool import start
from xray_runtime.workers.whole_model import WholeModel

RUNTIME = RuntimeConfig(threads=1, device="cpu", cpus_per_workhorse=0.01)
KINDS = {"WholeModel": None, "Learner": TRAINING, "Generator (vLLM)": VLLM}


def measured(kind: str) -> tuple[float, float]:
    """(CPU seconds, MiB) of a new worker."""
    libraries = KINDS[kind]
    worker: Any
    if libraries is None:
        worker = ray.remote(num_cpus=0)(WholeModel).remote()
        ray.get(worker.ping.remote())
    else:
        worker = start(Learner if libraries == TRAINING else Generator, RUNTIME, libraries)
        ray.get(worker.load_libraries.remote(*([GeneratorConfig()] if libraries == VLLM else [])))
    process = psutil.Process(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())))
    times = process.cpu_times()
    found = times.user + times.system, process.memory_full_info().uss / 2**20
    ray.kill(worker)
    return found


def one_ray(forked: bool, workers: int) -> dict[str, list[tuple[float, float]]]:
    """Measurements by kind, without the first of each, which waits for the import."""
    server = local_ray.fork_server if forked else lambda: None
    with mock.patch.object(local_ray, "fork_server", server), local_ray.running_ray(num_cpus=2):
        return {kind: [measured(kind) for _ in range(workers + 1)][1:] for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, help="of each kind, each way")
    workers = parser.parse_args().workers
    os.environ |= QUIET
    print(machine())
    plain, forked = one_ray(False, workers), one_ray(True, workers)
    rows = []
    for kind in KINDS:
        row = [kind]
        for column in (0, 1):
            values = [[each[column] for each in way[kind]] for way in (plain, forked)]
            medians = [statistics.median(each) for each in values]
            row += [f"{m:.1f} ({min(v):.1f} to {max(v):.1f})" for m, v in zip(medians, values, strict=True)]
        rows.append(tuple(row))
    table(("worker", "CPU s, imports", "CPU s, forked", "MiB, imports", "MiB, forked"), rows)


if __name__ == "__main__":
    main()
