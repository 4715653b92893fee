"""Runs in the workers of a server: describes its model, and takes weights that arrive in chunks.

vLLM mixes `WorkerExtension` into its worker. Importing this module registers the back end `BACKEND` for weights, which
then arrive by vLLM's own calls: `start_weight_update`, any number of `update_weights`, `finish_weight_update`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from xray_runtime.engines.generators.server.chunks import Assembler, Chunk
from xray_runtime.engines.generators.server.model import architecture
from xray_runtime.engines.generators.vllm.transfer import UpdateInfo, XrayWeightTransferEngine, register

BACKEND = "xray-http"


class ChunkTransferEngine(XrayWeightTransferEngine):
    """Loads a layer as soon as all its tensors have arrived, so that no second copy of the model is needed."""

    def start_weight_update(self) -> None:
        super().start_weight_update()
        self._assembler, self._waiting = Assembler(), dict[str, torch.Tensor]()
        """Tensors of incomplete layers."""

    def update_weights(self, update_info: Any) -> None:
        complete: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self._assembler.take(Chunk(pieces=update_info["pieces"], data=update_info["data"])):
            self._waiting[name] = tensor
            group = self._group_of(name)
            if group <= self._waiting.keys():
                complete += [(each, self._waiting.pop(each)) for each in sorted(group)]
        if complete:
            self.receive_weights(UpdateInfo(tensors=iter(complete)))
        torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        self._assembler.close()
        if self._waiting:
            name = min(self._waiting)
            missing = min(self._group_of(name) - self._waiting.keys())
            raise ValueError(f"weight {missing} is missing: its layer is incomplete")
        super().finish_weight_update()

    @cached_property
    def groups(self) -> list[list[str]]:
        """The names of the checkpoint's tensors, those together that must be loaded together."""
        return together(self._shapes, self.layers_of)

    @cached_property
    def _group_by_name(self) -> dict[str, frozenset[str]]:
        return {name: frozenset(group) for group in self.groups for name in group}

    def _group_of(self, name: str) -> frozenset[str]:
        # vLLM's own reload takes single tensors, if all come.
        return frozenset({name}) if self._reloader is None else self._group_by_name.get(name, frozenset({name}))


class WorkerExtension:
    """Methods that clients call by `/collective_rpc`."""

    def xray_description(self) -> dict[str, Any]:
        """The model and how it computes; see `connection.Description`."""
        worker: Any = self
        config = worker.vllm_config.model_config
        return {
            **dataclasses.asdict(architecture(Path(config.model))),
            "groups": worker.weight_transfer_engine.groups,
            "dtype": str(config.dtype).removeprefix("torch."),
            "device": worker.device.type,
            "threads": torch.get_num_threads(),
            "max_length": config.max_model_len,
        }

    def xray_abandon_update(self) -> None:
        """Leave a weight update that broke off: after an error at its end vLLM would refuse another one."""
        worker: Any = self
        worker._weight_update_active = False
        worker.weight_transfer_engine.reset_weight_update_target()


def together(names: Iterable[str], layers_of: Callable[[set[str]], set[str]]) -> list[list[str]]:
    """`names` in groups that share no layer."""
    seen: set[str] = set()
    groups = []
    for name in sorted(names):
        if name not in seen:
            group = {name}
            while (larger := layers_of(group)) != group:
                group = larger
            groups.append(sorted(group))
            seen |= group
    return groups


register(BACKEND, ChunkTransferEngine)
