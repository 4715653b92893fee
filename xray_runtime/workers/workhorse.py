"""Workhorses: Ray actors that hold one device and one shard of one model.

`learner.Learner` holds a `HeadedLM` (trained or frozen), `generator.Generator` an engine that samples. A Workhorse
knows its rank in its model and nothing of other models; everything between models goes through `WholeModel`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.cores import give_way
from xray_runtime.processes import redirect_output
from xray_runtime.workers.heartbeat import Heartbeat, HeartbeatSource
from xray_runtime.workers.staging import FileReceiver

if TYPE_CHECKING:
    from xray_runtime.weights.device_transfer import Device
    from xray_runtime.workers.nodes import WorkerInfo


@dataclass(frozen=True)
class RankInfo:
    """A Workhorse's rank in its model: which, of how many, where they meet, where its output is written."""

    role: str
    number: int
    """Which Workhorse of its model, counted over all replicas of a generator."""
    rank: int
    """Within its replica."""
    world_size: int
    host: str
    port: int
    log_dir: Path | None
    """None: where Ray puts it, on a node that does not see the stage's logs."""


SPIN_COUNT = 500
"""How often an OpenMP thread that waits looks for work before it sleeps (22 ns a look where it was measured: 11 μs).
One that sleeps at once must be woken for every operation of a small model; one that looks for longer takes cores from
other processes: 10,000 made a step three times slower beside a busy one. Measured by `benchmarks/threads.py`."""


REPRODUCIBLE = "AUTO"
"""MKL's mode of reductions in a fixed order and static scheduling: without it MKL does not promise the same bits from
one run to the next. Where both were compared (AVX-512) the bits are the same, and so is the speed, by
`benchmarks/threads.py --mkl OFF AUTO`."""


UNUSED = ("mlflow", "sklearn")
"""Imported by DeepSpeed and transformers where they are installed, and used by no Workhorse: 3 CPU seconds a start."""


class Workhorse(FileReceiver):
    """What all Workhorses share: device, threads, log file, rendezvous, heartbeat."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        give_way(runtime.niceness)
        # OpenMP reads these once, when torch is first imported. Waiting threads must sleep: several models share cores.
        os.environ |= {
            "OMP_NUM_THREADS": str(runtime.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": str(SPIN_COUNT),
            "MKL_CBWR": REPRODUCIBLE,
        }
        for library in UNUSED:
            # As Python documents it: an import of what is None here fails as if it was not installed.
            sys.modules.setdefault(library, None)  # type: ignore[arg-type]
        self.runtime = runtime
        self._heartbeat = HeartbeatSource()
        self._meeting: socket.socket | None = None

    def _begin(self, rank_info: RankInfo) -> None:
        """Bring the process into the state of a new one: it may have held another model before."""
        if rank_info.log_dir is not None:
            redirect_output(rank_info.log_dir / f"{rank_info.role}-{rank_info.number}.log")
        import torch

        self.rank_info = rank_info
        self._heartbeat.work_thread = threading.get_ident()
        self.device = torch.device(resolve_device(self.runtime.device))
        torch.set_num_threads(self.runtime.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling what `empty` returns would show reads of it, of which there are none, at 1,000 fills a step.
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False
        torch.manual_seed(0)

    @contextlib.contextmanager
    def _share_threads(self, at_once: int) -> Iterator[None]:
        """Compute with this model's share of `runtime.threads`, in the calling thread; with all of them afterwards.

        The number of threads changes float rounding. So it follows from the config and from what the caller says runs
        at the same time, never from what happens to run, and what comes between two such calls (an export, say) does
        not depend on which came before.
        """
        import torch

        torch.set_num_threads(max(self.runtime.threads // at_once, 1))
        try:
            yield
        finally:
            torch.set_num_threads(self.runtime.threads)

    def unload(self) -> None:
        """Free the model's memory, and its files that were staged here."""
        self.remove_directories()
        self._heartbeat = HeartbeatSource()
        self._close_meeting()

    def where(self) -> Device:
        """The device it holds."""
        import torch

        from xray_runtime.weights.device_transfer import Device
        from xray_runtime.weights.shared_memory import machine

        on_gpu = self.device.type == "cuda"
        return Device(machine(), str(torch.cuda.get_device_properties(0).uuid) if on_gpu else None)

    def worker_info(self) -> WorkerInfo:
        """Which process it is, and on which node."""
        from xray_runtime.workers.nodes import worker_info

        return worker_info()

    def heartbeat(self) -> Heartbeat:
        """That it lives, and what it is doing; answered in a thread of its own."""
        return self._heartbeat.heartbeat()

    def rendezvous(self) -> tuple[str, int]:
        """(host, free port) for this model's process group, asked of rank 0; the port stays free for it."""
        import ray

        host = ray.util.get_node_ip_address()
        self._close_meeting()
        self._meeting = reserve_port()
        return host, int(self._meeting.getsockname()[1])

    def _close_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None


def reserve_port() -> socket.socket:
    """A socket that keeps a free port for torch's store until it is closed.

    Imports come before the group: until then the system could give the port to another connection. A socket that is
    bound and does not listen keeps it for those who bind its number with SO_REUSEADDR, as torch's store does.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # On all addresses, as torch will listen: a server on loopback alone would else be given the same port.
    reserved.bind(("", 0))
    return reserved


def resolve_device(wanted: str) -> str:
    """ "cpu" or "cuda"; "auto" takes CUDA where this process has it. Imports torch only when it must look."""
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
