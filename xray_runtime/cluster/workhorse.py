"""Workhorses: Ray actors that hold one device and one shard of one model.

`learner.Learner` holds a `HeadedLM` (trained or frozen), `generator.Generator` an engine that samples. A Workhorse
knows its rank in its model and nothing of other models; everything between models goes through `WholeModel`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from xray_runtime.cluster.heartbeat import HeartbeatSource
from xray_runtime.cluster.plain_errors import plain_errors
from xray_runtime.cluster.pool.libraries import (
    configure_torch,
    cuda_environment,
    import_libraries,
    import_models,
    prepare_imports,
)
from xray_runtime.cluster.staging import FileReceiver
from xray_runtime.cluster.types import Heartbeat, RankInfo
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.cores import give_way
from xray_runtime.kernel.processes import at_low_priority, redirect_output, without_collection

if TYPE_CHECKING:
    from xray_runtime.cluster.types import WorkerInfo
    from xray_runtime.engines.sync.route import Device


@plain_errors
class Workhorse(FileReceiver):
    """Device, threads, log file, rendezvous and heartbeat of every Workhorse."""

    samples: ClassVar[bool] = False
    """Whether its model generates."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        give_way(runtime.niceness)
        prepare_imports(runtime.threads)
        os.environ |= cuda_environment(runtime)
        self.runtime = runtime
        self._heartbeat = HeartbeatSource()
        self._meeting: socket.socket | None = None

    def load_libraries(self, name: str) -> None:
        """Import slow libraries before there is a model; `name` as in `import_libraries`."""
        at_low_priority(functools.partial(self._load_libraries, name))

    @without_collection()
    def _load_libraries(self, name: str) -> None:
        import_models()
        import_libraries(name, self.runtime, resolve_device(self.runtime.device))

    def _begin(self, rank_info: RankInfo) -> None:
        """Reset the process, which may have held another model before."""
        if rank_info.log_dir is not None:
            redirect_output(rank_info.log_dir / f"{rank_info.role}-{rank_info.number}.log")
        import torch

        self.rank_info = rank_info
        self._heartbeat.work_thread = threading.get_ident()
        self.device = torch.device(resolve_device(self.runtime.device))
        torch.set_num_threads(self.runtime.threads)
        configure_torch(self.runtime, self.device.type, samples=self.samples)
        torch.manual_seed(0)

    @contextlib.contextmanager
    def _share_threads(self, at_once: int) -> Iterator[None]:
        """Use this model's share of `runtime.threads` in the calling thread while the context lasts.

        The number of threads changes float rounding. So it only depends on the config and on `at_once`, never on what
        happens to run at the same time.
        """
        import torch

        torch.set_num_threads(max(self.runtime.threads // at_once, 1))
        try:
            yield
        finally:
            torch.set_num_threads(self.runtime.threads)

    @contextlib.contextmanager
    def _turn(self, at_once: int = 1) -> Iterator[None]:
        """`_share_threads`, and `_release` at the end."""
        with self._share_threads(at_once):
            yield
        self._release()

    def _release(self) -> None:
        """Where models take turns on a GPU, return what torch keeps for this one's next pass: the next model would not
        find the memory that is planned for it."""
        if self.runtime.generator_sleeps:
            from xray_runtime.engines.offload import release

            release()

    def unload(self) -> None:
        """Free the model's memory, and its files that were staged here."""
        self.remove_directories()
        self._heartbeat = HeartbeatSource()
        self._close_meeting()

    def where(self) -> Device:
        import torch

        from xray_runtime.engines.sync.route import Device
        from xray_runtime.engines.sync.shared_memory import machine

        on_gpu = self.device.type == "cuda"
        return Device(machine(), str(torch.cuda.get_device_properties(0).uuid) if on_gpu else None)

    def worker_info(self) -> WorkerInfo:
        from xray_runtime.cluster.pool.nodes import worker_info

        return worker_info()

    def heartbeat(self) -> Heartbeat:
        """Its heartbeat, answered in a separate thread."""
        return self._heartbeat.heartbeat()

    def rendezvous(self) -> tuple[str, int]:
        """(host, port) for this model's process group, asked of rank 0; the port is reserved."""
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
    """A socket that reserves a free port for torch's store until it is closed.

    A bound socket that does not listen keeps the port from other connections, but not from a bind with SO_REUSEADDR,
    as torch's store makes it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # On all addresses as torch listens, or a server on loopback could get the same port.
    reserved.bind(("", 0))
    return reserved


def resolve_device(wanted: str) -> str:
    """ "cpu" or "cuda"; "auto" is CUDA if this process has it. Imports torch only for "auto"."""
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
