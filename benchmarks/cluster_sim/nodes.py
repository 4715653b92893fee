"""Ray nodes with GPUs that do not exist, all on this machine."""

from __future__ import annotations

import os
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

MAX_NODES = 8
"""Raylets of one machine; more GPUs make wider nodes."""
STORE_BYTES = 400_000_000
"""Object store of each node."""
STARTS = 5
"""Ray gives a new node half a minute, which a busy machine does not always keep."""


class GPUNodes:
    """A head without GPUs and, of `num_gpus`, nodes of eight; or more, where that would be over `MAX_NODES`."""

    def __init__(self, num_gpus: int) -> None:
        self.per_node = max(8, -(-num_gpus // MAX_NODES))
        self._cluster: Any = Cluster()
        self._start(num_cpus=8, num_gpus=0, include_dashboard=False)
        ray.init(address=self._cluster.address, namespace="xray", log_to_driver=False, logging_level="ERROR")
        self._nodes = [self._add() for _ in range(-(-num_gpus // self.per_node))]

    def __len__(self) -> int:
        return len(self._nodes)

    def _add(self) -> Any:
        return self._start(num_cpus=4 * self.per_node, num_gpus=self.per_node)

    def _start(self, **options: Any) -> Any:
        for attempt in range(STARTS):
            try:
                return self._cluster.add_node(object_store_memory=STORE_BYTES, **options)
            except Exception:
                if attempt == STARTS - 1:
                    raise

    def lose_one(self) -> None:
        """Kill the first node as if it lost its power."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)

    def add_one(self) -> None:
        """Let a new node join. Only in the main thread, since Ray sets signal handlers."""
        self._nodes.append(self._add())

    def end(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def driver_bytes() -> int:
    """Memory of this process alone."""
    return int(psutil.Process(os.getpid()).memory_full_info().uss)


def store_bytes() -> int:
    """Bytes that all object stores hold now."""
    from ray._private.internal_api import node_stats

    addresses = [(n["NodeManagerAddress"], n["NodeManagerPort"]) for n in ray.nodes() if n["Alive"]]
    stats = [node_stats(*address, include_memory_info=False).store_stats for address in addresses]
    return sum(int(each.object_store_bytes_used) for each in stats)
