"""Facts that actors exchange: a rank, a worker, a heartbeat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankInfo:
    """A Workhorse's rank in its model, the rendezvous of the ranks, and the log directory."""

    role: str
    number: int
    """Number of the Workhorse over all replicas of a generator."""
    rank: int
    """Rank within its replica."""
    world_size: int
    host: str
    port: int
    log_dir: Path | None
    """None: Ray's own log, on a node that does not see the stage's directory."""


@dataclass(frozen=True)
class WorkerInfo:
    """Node, process and environment of a worker."""

    node: str
    """Ray's id of the node."""
    host: str
    pid: int
    environment_digest: str


@dataclass(frozen=True)
class Heartbeat:
    host: str
    pid: int
    waits_s: float
    """Seconds it has been waiting in one collective; 0: it is not waiting."""
    doing: str
    """Function, file and line that it is executing."""
    parts: int
    """Parts of work it has done (`signs`)."""
    common_parts: int
    """Those that every rank of its model does, in the same order."""
    stands_s: float
    """Seconds since it has done the last of these."""
    load: float
    """Load of its machine (`kernel.cores.load`)."""
