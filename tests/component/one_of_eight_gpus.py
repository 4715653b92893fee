"""Prints the machine that layouts are chosen for, where Ray has one of eight GPUs.

A program of its own, since a process can only have one Ray: `python -m tests.component.one_of_eight_gpus DIRECTORY`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray

from xray_runtime.kernel.config.section import RuntimeConfig

MEBIBYTES = (81_559, 81_559, 81_559, 81_559, 81_559, 81_559, 81_559, 80_000)


def main(directory: Path) -> None:
    script = directory / "nvidia-smi"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {size}\n" for size in MEBIBYTES))
    script.chmod(0o755)
    os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    from xray_runtime.cluster.pool.placement import cluster_machine

    found = cluster_machine(RuntimeConfig())
    print(found.device, found.num_devices, found.devices_per_node, found.memory_bytes)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
