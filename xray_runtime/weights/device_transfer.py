"""Weights from GPU to GPU, by vLLM's own transfer engines: `ipc` where both share devices, else `nccl`.

The trainer's side, and the choice by topology. vLLM's trainer engine drives the sync: it starts a session on every
generator rank, streams the gathered tensors in packed chunks, and finishes the session. Nothing that arrives is kept: a
session that breaks off leaves the generator at the last version that came by the object store, or at its checkpoint.
There are no checksums on this way; that the generator computes the policy is for PPO's `max_mismatch` to see.
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
    """Where a Workhorse computes. `gpu` is the physical device's UUID; None: on CPU."""

    machine: str
    """See `shared_memory.machine`."""
    gpu: str | None = None


def choose(
    wanted: Literal["auto", "plasma", "nccl", "ipc"],
    config: GeneratorConfig,
    trainer: Sequence[Device],
    generator: Sequence[Device],
) -> Transport:
    """The way of the weights from `trainer`'s ranks to `generator`'s.

    Raises:
        ValueError: `wanted` cannot work between these devices.
    """
    if wanted == "plasma":
        return "plasma"
    all_on_gpus = all(place.gpu is not None for place in [*trainer, *generator])
    trains, samples = {place.gpu for place in trainer}, {place.gpu for place in generator}
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
    """All generator ranks as the one client that vLLM's trainer engines speak to."""

    def __init__(self, transport: Transport, ranks: Sequence[WorkhorseHandle], per_replica: int, version: int) -> None:
        self._transport, self._ranks, self._per_replica, self._version = transport, ranks, per_replica, version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = []
        for number in range(len(self._ranks)):
            # vLLM adds a rank's place within its replica; replicas follow each other.
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
    """Send `tensors` to all generator `ranks`; every rank of the trainer calls it, rank 0 drives.

    Args:
        tensors: gathers (name, whole tensor) pairs, in the order of `metadata`; a collective.
        meet: host and free port on rank 0 (nccl).
        per_replica: generator ranks that share one copy of the model.
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
