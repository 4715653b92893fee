"""The nodes of a Ray cluster: what each has, which were lost, and which process is on which."""

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
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xray_runtime.config.validation import ConfigError
from xray_runtime.store.identity import OTHER_ENVIRONMENT, environment_digest
from xray_runtime.workers.liveness import answered

log = logging.getLogger(__name__)

PLACEMENT = "placement.jsonl"
NODES_SECONDS = 120.0
"""How long all nodes together have to answer, or to be found dead."""
ANSWER_SECONDS = 20.0
"""A node may have to start a process for its answer."""


@dataclass(frozen=True)
class WorkerInfo:
    """Where a process runs, and with which code."""

    node: str
    """Ray's id of the node."""
    host: str
    pid: int
    environment_digest: str


def nodes() -> list[dict[str, float]]:
    """What each node of the cluster has in all."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def num_lost() -> int:
    """How many nodes this cluster had and has no more."""
    return sum(not node["Alive"] for node in ray.nodes())


def node_addresses() -> set[str]:
    """Network addresses of the nodes; several nodes may share one machine, and its address."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def is_on_all_nodes(directory: Path) -> bool:
    """Whether all nodes share the disk that `directory` is on. Nodes that do not answer are not asked again."""
    if len(ray.nodes()) < 2:
        return True
    with probe_file(directory) as probe:
        there = [NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in ray.nodes() if n["Alive"]]
        asked = [_sees.options(scheduling_strategy=strategy).remote(probe) for strategy in there]
        done = ray.wait(asked, num_returns=len(asked), timeout=NODES_SECONDS)[0]
        return all(ray.get(ref) for ref in done if answered(ref))


@ray.remote(num_cpus=0, max_retries=0)
def _sees(path: Path) -> bool:
    return path.exists()


@contextlib.contextmanager
def probe_file(directory: Path) -> Iterator[Path]:
    """A file in `directory` while the context lasts: a node that does not see it has another disk there."""
    directory.mkdir(parents=True, exist_ok=True)
    # A new name: a network disk may remember for seconds that a file was not there.
    probe = directory / f".probe-{uuid.uuid4().hex}"
    probe.touch()
    try:
        yield probe
    finally:
        probe.unlink()


def await_answers(timeout_s: float = NODES_SECONDS) -> None:
    """Wait until every node that Ray believes alive answers, or is found dead; `timeout_s` at most.

    Ray takes some seconds to notice that a machine is gone, and would meanwhile schedule Workhorses there: an attempt
    that begins right after the loss would fail as well.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        if len(alive) < 2:
            return
        there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in alive]
        asked = [_answer.options(scheduling_strategy=strategy).remote() for strategy in there]
        ready, silent = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)
        for ref in silent:
            ray.cancel(ref, force=True)
        if not silent and all(map(answered, ready)):
            return
        time.sleep(1)


@ray.remote(num_cpus=0, max_retries=0)
def _answer() -> None:
    """Answers if the node it is sent to lives."""


def current_node() -> str:
    """Ray's id of the node this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def same_node() -> NodeAffinitySchedulingStrategy:
    """Schedules an actor onto the node of the process that starts it, so that both are lost together or not at all."""
    return NodeAffinitySchedulingStrategy(current_node(), soft=False)


def worker_info() -> WorkerInfo:
    """Where this process runs."""
    return WorkerInfo(current_node(), socket.gethostname(), os.getpid(), environment_digest())


def check_environment(what: str, there: WorkerInfo, wanted: str) -> None:
    """Raises ConfigError if a process has other code or libraries than the stage it works for.

    Its results would carry a key that is not theirs.
    """
    if there.environment_digest != wanted:
        raise ConfigError(f"{what} on {there.host}: {OTHER_ENVIRONMENT}")


def note_placement(log_dir: Path, workers: Mapping[str, Sequence[WorkerInfo]]) -> None:
    """Append to `log_dir` which node the Workhorses of each role are on: one line an attempt.

    Args:
        workers: role → where each of its ranks runs.
    """
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
    """The node that stages must run on, this one, where another does not see the output directory; else None.

    Asked once: what joins later is expected to be like the others.
    """
    if is_on_all_nodes(root):
        return None
    log.warning(
        "%s is not on a disk that all nodes share: stages run on this node, which sends files to the others", root
    )
    return current_node()
