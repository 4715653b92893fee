"""Transfer weights from GPU to GPU with vLLM's transfer engines: `ipc` on shared devices, else `nccl`.

This is the trainer's side, and the choice of the transport. vLLM's trainer engine drives the sync: it starts a session
on every generator rank, streams the gathered tensors in packed chunks of bfloat16, as the generator holds them, and
finishes the session. After a broken session the generator returns to the last version from the object store, or to its
checkpoint, and the next sync connects anew. There are no checksums here; PPO's `max_mismatch` checks that the generator
computes the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
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
    """The transport of weights from `trainer`'s ranks to `generator`'s. Raises ValueError: `wanted` cannot work between
    these devices."""
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
    gpus = "the same GPUs" if wanted == "ipc" else "GPUs of their own"
    raise ValueError(
        f"runtime.weight_transfer: {wanted!r} needs generator.engine 'vllm' and generator and trainer on {gpus}; "
        f"available here: {possible!r}"
    )


def obstacle(trained: Set[str] | None, together: Set[str]) -> str | None:
    """Why vLLM's engines would send wrong weights; None if they are right.

    Args:
        trained: names of the trained weights; None: no rank has all of them whole.
        together: `trained` and all other weights in the same layers of vLLM's model.
    """
    if trained is None:
        return "the policy is split over tensor-parallel or pipeline-parallel ranks, and only its first rank sends"
    if lacking := together - trained:
        # vLLM leaves the rest of such a layer uninitialized.
        return f"{min(lacking)} is not trained, but vLLM holds it in one layer with weights that are"
    return None


@dataclass(frozen=True)
class Route:
    """How weights come from a trainer to a generator."""

    transport: Transport
    shared: bool
    """Whether both are on one machine."""
    dtype: str | None
    """Precision in which `plasma` sends them; None: as they are."""


def choose_route(
    wanted: Literal["auto", "plasma", "nccl", "ipc"],
    config: GeneratorConfig,
    trainer: Sequence[Device],
    generator: Sequence[Device],
    names: Callable[[], tuple[Set[str] | None, Set[str]]],
) -> Route:
    """The route of weights from `trainer`'s ranks to `generator`'s; `names` finds the arguments of `obstacle`. Raises
    ValueError: `wanted` cannot work between these devices, or would send wrong weights."""
    transport = choose(wanted, config, trainer, generator)
    if transport != "plasma" and (why := obstacle(*names())):
        if wanted != "auto":
            raise ValueError(f"runtime.weight_transfer: {wanted!r} is not allowed: {why}; 'plasma' works")
        transport = "plasma"
    # vLLM holds bfloat16 on GPUs, so that more would be sent in vain.
    half = config.engine == "vllm" and all(device.gpu is not None for device in generator)
    on_one_machine = len({device.machine for device in [*trainer, *generator]}) == 1
    return Route(transport, on_one_machine, "bfloat16" if half else None)


class _Receivers:
    """All generator ranks as the single client of vLLM's trainer engines."""

    def __init__(self, transport: Transport, ranks: Sequence[WorkhorseHandle], per_replica: int) -> None:
        self._transport, self._ranks, self._per_replica = transport, ranks, per_replica
        self.version = 0

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

        ray.get([r.receive.remote(step, info, self.version) for r, info in zip(self._ranks, infos, strict=True)])


class Sender:
    """One trainer rank's connection with a generator, which all its syncs use. Rank 0 drives them.

    Args:
        tensors: gathers (name, whole tensor) pairs, in the same order every time; a collective of the trainer's ranks.
        ranks: all ranks of the generator.
        per_replica: number of generator ranks that share one copy of the model.
    """

    def __init__(
        self,
        transport: Transport,
        tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        rank: int,
        ranks: Sequence[WorkhorseHandle],
        per_replica: int,
    ) -> None:
        self._transport, self._tensors, self._rank, self._num_receivers = transport, tensors, rank, len(ranks)
        self._client = _Receivers(transport, ranks, per_replica)
        self._engine: Any = None

    def send(self, version: int, meet: tuple[str, int]) -> None:
        """Send the weights as `version`; every trainer rank calls this. `meet`: host and free port on rank 0, where the
        first sync by nccl meets."""
        self._client.version = version
        try:
            if self._engine is None:
                self._engine = self._connect(meet)
            self._engine.send_weights()
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _connect(self, meet: tuple[str, int]) -> Any:
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

        tensors = self._tensors
        # Gathered once for the shapes only, which no layout knows otherwise.
        metadata = [ParamMeta(name, torch.bfloat16, tuple(tensor.shape)) for name, tensor in tensors()]

        class Source(WeightSource):
            def metadata(self) -> list[ParamMeta]:
                return metadata

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return ((name, tensor.to(torch.bfloat16)) for name, tensor in tensors())

        if self._transport == "nccl":
            info: Any = NCCLTrainerInitInfo(*meet, world_size=1 + self._num_receivers, rank=self._rank)
        else:
            # vLLM refuses a tensor that is larger than its buffer: an embedding of 152,000 × 4,096 is 1.2 GB.
            largest = max(math.prod(meta.shape) * meta.dtype.itemsize for meta in metadata)
            size = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
            info = IPCTrainerInitInfo(rank=self._rank, packed=True, packed_buffer_size_bytes=size)
        return WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=Source())
