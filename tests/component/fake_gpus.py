"""Opens models on GPUs that only Ray believes in, and prints where they are and when they were built; before that, the
machine that layouts are chosen for.

A program of its own, since a process can only have one Ray: `python -m tests.component.fake_gpus DIRECTORY`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from tests.component.processes import Empty, EmptySpec, open_models
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.opening import WORKHORSES
from xray_runtime.cluster.types import RankInfo
from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.kernel.config.section import RuntimeConfig

NUM_GPUS = 4
"""Of eight that nvidia-smi sees, one of them smaller."""
MEBIBYTES = (*[81_559] * 7, 80_000)
BUILD_SECONDS = 0.5


class Noting(Empty):
    """Notes its GPUs, and when it was built."""

    def build(self, spec: Any, rank_info: RankInfo) -> None:
        begin = time.time()
        time.sleep(BUILD_SECONDS)
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        note = {"role": rank_info.role, "number": rank_info.number, "gpus": gpus, "begin": begin, "end": time.time()}
        (spec.directory / f"{rank_info.role}-{rank_info.number}.json").write_text(json.dumps(note))


@dataclass(frozen=True)
class NotingSpec(EmptySpec): ...


@dataclass(frozen=True)
class NotingGeneratorSpec(GeneratorSpec): ...


WORKHORSES |= {NotingSpec: Noting, NotingGeneratorSpec: Noting}


def main(directory: Path) -> None:
    script = directory / "nvidia-smi"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {size}\n" for size in MEBIBYTES))
    script.chmod(0o755)
    os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"
    ray.init(address="local", num_cpus=2, num_gpus=NUM_GPUS, include_dashboard=False, log_to_driver=False)
    from xray_runtime.cluster.pool.placement import cluster_machine

    found = cluster_machine(RuntimeConfig())
    print(found.device, found.num_devices, found.devices_per_node, found.memory_bytes)
    runtime = RuntimeConfig(device="cuda", threads=1, cpus_per_workhorse=0.1, gpus_per_workhorse=0.333)
    specs: dict[str, Any] = {
        "policy": NotingSpec(directory, frozen=FrozenConfig(num_workhorses=2)),
        "reference": NotingSpec(directory, frozen=FrozenConfig(num_workhorses=2)),
        "generator": NotingGeneratorSpec(directory, 32, GeneratorConfig(tensor_parallel=2)),
    }
    with open_models(runtime, directory / "logs", specs):
        print(json.dumps({path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
