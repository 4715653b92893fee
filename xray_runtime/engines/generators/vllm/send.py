"""Sends weights from GPU to GPU with vLLM's transfer engines: `ipc` on shared devices, else `nccl`.

vLLM's trainer engine drives the transfer: it starts a session on every generator rank, streams the gathered tensors in
packed chunks of bfloat16, as the generator holds them, and finishes the session. The next one connects anew after a
broken session.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from xray_runtime.engines.capabilities import Transport
from xray_runtime.engines.generator import Receivers


class _Client:
    """All generator ranks as the single client of vLLM's trainer engines."""

    def __init__(self, transport: Transport, ranks: Receivers) -> None:
        self._transport, self._ranks, self.version = transport, ranks, 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = []
        for number in range(self._ranks.count):
            # vLLM adds a rank's position within its replica; replicas follow each other.
            offset = {"rank_offset": 1 + number - number % self._ranks.per_replica} if self._transport == "nccl" else {}
            infos.append({"backend": self._transport, "info": init_info | offset})
        self._all("init", infos)

    def start_weight_update(self) -> None:
        self._all("start", [{}] * self._ranks.count)

    def update_weights(self, update_info: Any) -> None:
        self._all("update", [update_info] * self._ranks.count)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish", [{}] * self._ranks.count)

    def _all(self, step: str, infos: list[dict[str, Any]]) -> None:
        self._ranks.step(step, infos, self.version)


class Sender:
    """One trainer rank's connection with a generator, which all its syncs use. Rank 0 drives them.

    Args:
        tensors: gathers (name, whole tensor) pairs, in the same order every time; a collective of the trainer's ranks.
    """

    def __init__(
        self,
        transport: Transport,
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        rank: int,
        receivers: Receivers,
    ) -> None:
        self._transport, self._tensors, self._rank, self._num_receivers = transport, tensors, rank, receivers.count
        self._client = _Client(transport, receivers)
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

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return ((name, tensor.to(torch.bfloat16)) for name, tensor in tensors())

        if self._transport == "nccl":
            info: Any = NCCLTrainerInitInfo(*meet, world_size=1 + self._num_receivers, rank=self._rank)
        else:
            # vLLM refuses a tensor that is larger than its buffer: an embedding of 152,000 × 4,096 is 1.2 GB.
            largest = max(math.prod(meta.shape) * meta.dtype.itemsize for meta in metadata)
            size = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
            info = IPCTrainerInitInfo(rank=self._rank, packed=True, packed_buffer_size_bytes=size)
        return WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=Source())
