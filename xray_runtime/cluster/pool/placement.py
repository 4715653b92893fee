"""The device that `auto` means on this cluster, and the machines that layouts are chosen for."""

from __future__ import annotations

import subprocess

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.cluster.pool.nodes import nodes
from xray_runtime.kernel.config.section import RuntimeConfig

ASK_SECONDS = 120.0


def device(runtime: RuntimeConfig) -> str:
    """ "cpu" or "cuda". Depends on the cluster, not on this process, which may have no device."""
    if runtime.device != "auto":
        return runtime.device
    return "cuda" if any(node.get("GPU", 0.0) for node in nodes()) else "cpu"


def with_device(runtime: RuntimeConfig) -> RuntimeConfig:
    """`runtime` with the device that `auto` means on this cluster."""
    return runtime.model_copy(update={"device": device(runtime)})


def cluster_machine(runtime: RuntimeConfig) -> Machine:
    """This cluster as equal devices, with the minimum of each quantity so that a plan fits everywhere."""
    kind = device(runtime)
    resource = "GPU" if kind == "cuda" else "CPU"
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource, 0.0) >= 1]
    machines = ray.get(
        [
            _memory.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(kind)
            for node in alive
        ],
        timeout=ASK_SECONDS,
    )
    if kind == "cuda":
        # Ray may have been given a part of a node's GPUs, and does not say which.
        counts = [int(node["Resources"][resource]) for node in alive]
        return Machine(num_devices=sum(counts), memory_bytes=min(map(min, machines)), devices_per_node=min(counts))
    cores = [int(node["CPU"]) for node in nodes() if node.get("CPU", 0.0) >= 1]
    counts = [max(n // runtime.threads, 1) for n in cores]
    memory = min(total // count for [total], count in zip(machines, counts, strict=True))
    return Machine(num_devices=sum(counts), memory_bytes=memory, device="cpu", devices_per_node=min(counts))


@ray.remote(num_cpus=0)
def _memory(kind: str) -> list[int]:
    """Bytes of each GPU of this node, or of its RAM."""
    if kind == "cpu":
        return [psutil.virtual_memory().total]
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return [int(mebibytes) * 2**20 for mebibytes in lines]
