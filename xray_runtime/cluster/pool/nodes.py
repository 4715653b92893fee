"""The nodes of a Ray cluster: their resources, losses, disks and processes."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xray_runtime.cluster.pool.liveness import answered
from xray_runtime.cluster.types import WorkerInfo
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.store.identity import OTHER_ENVIRONMENT, environment_digest

log = logging.getLogger(__name__)

PLACEMENT = "placement.jsonl"
NODES_SECONDS = 120.0
"""Time for all nodes to answer or to be found dead."""
ANSWER_SECONDS = 20.0
"""Time for a node to answer, for which it may have to start a process."""


def nodes() -> list[dict[str, float]]:
    """Total resources of each node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def num_lost() -> int:
    """Number of nodes that this cluster has lost."""
    return sum(not node["Alive"] for node in ray.nodes())


def node_addresses() -> set[str]:
    """Network addresses of the nodes; nodes on one machine share an address."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


@ray.remote(num_cpus=0, max_retries=0)
def _sees(path: Path) -> bool:
    return path.exists()


@contextlib.contextmanager
def probe_file(directory: Path) -> Iterator[Path]:
    """A file in `directory` while the context lasts: nodes that do not see it have another disk there."""
    directory.mkdir(parents=True, exist_ok=True)
    # With a new name: network disks may cache for seconds that a file does not exist.
    probe = directory / f".probe-{uuid.uuid4().hex}"
    probe.touch()
    try:
        yield probe
    finally:
        probe.unlink()


def await_answers() -> None:
    """Wait until every node that Ray considers alive answers or is found dead, for at most NODES_SECONDS.

    Ray takes seconds to notice that a machine is gone. Meanwhile it would schedule Workhorses there, and an attempt
    right after the loss would fail too.
    """
    deadline = time.monotonic() + NODES_SECONDS
    while time.monotonic() < deadline:
        strategies = each_node()
        if len(strategies) < 2:
            return
        calls = [_answer.options(scheduling_strategy=on).remote() for on in strategies]
        ready, silent = ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS)
        for ref in silent:
            ray.cancel(ref, force=True)
        if not silent and all(map(answered, ready)):
            return
        time.sleep(1)


@ray.remote(num_cpus=0, max_retries=0)
def _answer() -> None:
    """Answers if its node lives."""


def each_node() -> list[NodeAffinitySchedulingStrategy]:
    """Strategies that each schedule onto one living node."""
    return [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes() if node["Alive"]]


def current_node() -> str:
    """Ray's id of this process's node."""
    return str(ray.get_runtime_context().get_node_id())


def same_node() -> NodeAffinitySchedulingStrategy:
    """Schedules an actor onto this process's node, so that both are lost together."""
    return NodeAffinitySchedulingStrategy(current_node(), soft=False)


def worker_info() -> WorkerInfo:
    return WorkerInfo(current_node(), socket.gethostname(), os.getpid(), environment_digest())


def check_environment(what: str, there: WorkerInfo, wanted: str) -> None:
    """Raises ConfigError if a process has other code or libraries than its stage, whose key would then be wrong."""
    if there.environment_digest != wanted:
        raise ConfigError(f"{what} on {there.host}: {OTHER_ENVIRONMENT}")


def note_placement(log_dir: Path, workers: Mapping[str, Sequence[WorkerInfo]]) -> None:
    """Append a line to the placement log in `log_dir`. `workers`: role → worker of each rank."""
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    models = {
        role: [{"node": names[r.node], "node_id": r.node, "host": r.host, "pid": r.pid} for r in ranks]
        for role, ranks in workers.items()
    }
    log_dir.mkdir(parents=True, exist_ok=True)
    with (log_dir / PLACEMENT).open("a") as file:
        file.write(json.dumps({"time": time.time(), "models": models}) + "\n")


@functools.cache
def only_node(root: Path) -> str | None:
    """This node, if stages must run here because another node does not see the output directory; else None.

    Checked once, so nodes that join later must be like the others.
    """
    if len(ray.nodes()) < 2:
        return None
    with probe_file(root) as probe:
        calls = [_sees.options(scheduling_strategy=on).remote(probe) for on in each_node()]
        done = ray.wait(calls, num_returns=len(calls), timeout=NODES_SECONDS)[0]
        if all(ray.get(ref) for ref in done if answered(ref)):
            return None
    log.warning(
        "%s is not on a disk that all nodes share: stages run on this node, which sends files to the others", root
    )
    return current_node()
