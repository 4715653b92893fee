"""Transfer weights from GPU to GPU with vLLM's transfer engines: `ipc` on shared devices, else `nccl`.

This is the trainer's side, and the choice of the transport. vLLM's trainer engine drives the sync: it starts a session
on every generator rank, streams the gathered tensors in packed chunks, and finishes the session. After a broken session
the generator returns to the last version from the object store, or to its checkpoint. There are no checksums here;
PPO's `max_mismatch` checks that the generator computes the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from xray_runtime.config.engines import GeneratorConfig
    from xray_runtime.workers.protocols import WorkhorseHandle

Transport = Literal["plasma", "nccl", "ipc"]


@dataclass(frozen=True)
class Device:
    """A Workhorse's device. `gpu` is the UUID of the physical device; None: CPU."""

    machine: str
    """See `shared_memory.machine`."""
    gpu: str | None = None


def choose(
    wanted: Literal["auto", "plasma", "nccl", "ipc"],
    config: GeneratorConfig,
    trainer: Sequence[Device],
    generator: Sequence[Device],
) -> Transport:
    """The transport of weights from `trainer`'s ranks to `generator`'s.

    Raises:
        ValueError: `wanted` cannot work between these devices.
    """
    if wanted == "plasma":
        return "plasma"
    all_on_gpus = all(device.gpu is not None for device in [*trainer, *generator])
    trains, samples = {device.gpu for device in trainer}, {device.gpu for device in generator}
    possible: Transport = "plasma"
    if config.engine == "vllm" and all_on_gpus:
        if samples <= trains:
            possible = "ipc"
        elif not samples & trains:
            possible = "nccl"
    if wanted in ("auto", possible):
        return possible
    needs = (
        "generator and trainer on the same GPUs" if wanted == "ipc" else "generator and trainer on GPUs of their own"
    )
    raise ValueError(
        f"runtime.weight_transfer: {wanted!r} needs generator.engine 'vllm' and {needs}; available here: {possible!r}"
    )


class _Receivers:
    """All generator ranks as the single client of vLLM's trainer engines."""

    def __init__(self, transport: Transport, ranks: Sequence[WorkhorseHandle], per_replica: int, version: int) -> None:
        self._transport, self._ranks, self._per_replica, self._version = transport, ranks, per_replica, version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = []
        for number in range(len(self._ranks)):
            # vLLM adds a rank's position within its replica; replicas follow each other.
            offset = {"rank_offset": 1 + number - number % self._per_replica} if self._transport == "nccl" else {}
            infos.append({"backend": self._transport, "info": init_info | offset})
        self._all("init", infos)

    def start_weight_update(self) -> None:
        self._all("start", [{}] * len(self._ranks))

    def update_weights(self, update_info: Any) -> None:
        self._all("update", [update_info] * len(self._ranks))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish", [{}] * len(self._ranks))

    def _all(self, step: str, infos: list[dict[str, Any]]) -> None:
        import ray

        ray.get([r.receive.remote(step, info, self._version) for r, info in zip(self._ranks, infos, strict=True)])


def send(
    transport: Transport,
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    metadata: list[tuple[str, torch.dtype, tuple[int, ...]]],
    rank: int,
    meet: tuple[str, int],
    ranks: Sequence[WorkhorseHandle],
    per_replica: int,
    version: int,
) -> None:
    """Send `tensors` to all generator `ranks`; every trainer rank calls this, rank 0 drives.

    Args:
        tensors: gathers (name, whole tensor) pairs in the order of `metadata`; a collective.
        meet: rendezvous, host and free port on rank 0 (nccl).
        per_replica: number of generator ranks that share one copy of the model.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(*entry) for entry in metadata]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return tensors()

    if transport == "nccl":
        info: Any = NCCLTrainerInitInfo(*meet, world_size=1 + len(ranks), rank=rank)
    else:
        info = IPCTrainerInitInfo(rank=rank, packed=True)
    client = _Receivers(transport, ranks, per_replica, version)
    WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source()).send_weights()
