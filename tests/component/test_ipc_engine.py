"""vLLM's own engines for CUDA IPC on both sides of a sync, in one process on the CPU: a handle names memory of this
process instead of a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from xray_runtime.data.batch import TextBatch
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.generator import Receivers
from xray_runtime.engines.generators.vllm.send import Sender
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.engines.sync.versioned import StaleWeightsError
from xray_runtime.kernel.config.section import RuntimeConfig

SAMPLING = Sampling(max_new_tokens=6, temperature=0.7, stop_token_ids=(1,), pad_token_id=0)
BUFFER_BYTES = 2**16
"""Bytes of a chunk: the model has 230 KB in bfloat16, so that there are several."""
ENVIRONMENT = {"env_vars": {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO"}}


class Client:
    """The generator, as `device_transfer._Receivers` calls it over Ray."""

    version = 0

    def __init__(self, engine: Generation) -> None:
        self._engine, self.num_chunks = engine, 0

    def init_weight_transfer_engine(self, info: Any) -> None:
        self._engine.receive("init", {"backend": "ipc", "info": info}, self.version)

    def start_weight_update(self) -> None:
        self._engine.receive("start", {}, self.version)

    def update_weights(self, info: Any) -> None:
        self.num_chunks += 1
        self._engine.receive("update", info, self.version)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.receive("finish", {}, self.version)


def on_cpu(stack: ExitStack) -> None:
    """CUDA's part of vLLM's engines, without CUDA."""
    from vllm.distributed.weight_transfer import packed_tensor

    exported: list[torch.Tensor] = []
    empty = torch.empty

    def export(buffer: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        exported.append(buffer)
        # The seventh is the device's number, which the receiver replaces.
        return None, (len(exported) - 1, *[None] * 5, 0)

    def make(*size: Any, **options: Any) -> torch.Tensor:
        return empty(*size, **options | {"device": "cpu"} if options.get("device") == "cuda" else options)

    for name, replacement in {
        "torch.multiprocessing.reductions.rebuild_cuda_tensor": lambda number, *_: exported[number].view(-1),
        "torch.cuda.get_device_properties": lambda index: SimpleNamespace(uuid="GPU-0"),
        "torch.cuda.current_stream": lambda: SimpleNamespace(synchronize=lambda: None),
        "torch.cuda.ipc_collect": lambda: None,
        "torch.accelerator.current_device_index": lambda: 0,
        "torch.empty": make,
    }.items():
        stack.enter_context(patch(name, replacement))
    stack.enter_context(patch.object(packed_tensor, "reduce_tensor", export))
    stack.enter_context(patch.object(packed_tensor, "DEFAULT_PACKED_BUFFER_SIZE_BYTES", BUFFER_BYTES))


@ray.remote(num_cpus=0, max_calls=1)
def _synced(directory: Path) -> dict[str, Any]:
    """Replies of versions 1 and 2 by IPC, and with the same weights by `write`."""
    engine = Generation(directory, 64, GeneratorConfig(), RuntimeConfig(threads=1), EngineRank("cpu"))
    held, client = load_file(directory / "model.safetensors"), Client(engine)
    sent: dict[str, torch.Tensor] = {}

    def weights(scale: float) -> dict[str, torch.Tensor]:
        return {name: (tensor * scale).bfloat16().float() for name, tensor in held.items()}

    def sample(version: int) -> TextBatch:
        return engine.generate([[5, 9, 7, 42], [8, 100, 3]], [1, 2], SAMPLING, version)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from sent.items()

    def is_mapped(worker: Any) -> bool:
        return worker.weight_transfer_engine._direct._packed_importer._entry is not None

    sampler: Any = engine._sampler
    sender = Sender("ipc", tensors, 0, Receivers(0, 1, lambda *_: None))
    sender._client = client  # type: ignore[assignment]
    found: dict[str, Any] = {"written": [], "sent": [], "mapped": []}
    with ExitStack() as stack:
        on_cpu(stack)
        for version, scale in ((1, 1.5), (2, 0.5)):
            sent |= weights(scale)
            sender.send(version, ("127.0.0.1", 1))
            found["mapped"] += sampler._llm.collective_rpc(is_mapped)
            found["sent"].append(sample(version))
        found["chunks"] = client.num_chunks
        assert engine.weights.drop()
        sent.pop(min(sent))
        try:
            sender.send(3, ("127.0.0.1", 1))
        except StaleWeightsError as error:
            found["refused"] = str(error)
        found["checkpoint"] = sample(0)
    for scale in (1.5, 0.5, 1.0):
        sampler.write(iter((weights(scale) if scale != 1 else held).items()), 0)
        found["written"].append(sample(0))
    return found


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_the_bits_of_the_object_store_come_by_ipc_and_the_buffer_is_let_go(tiny_model: Path) -> None:
    found = ray.get(_synced.options(runtime_env=ENVIRONMENT).remote(tiny_model))
    one, two, plain = (rows.rollout_logprobs.values for rows in found["written"])
    np.testing.assert_array_equal(found["sent"][0].rollout_logprobs.values, one)
    np.testing.assert_array_equal(found["sent"][1].rollout_logprobs.values, two)
    assert not np.array_equal(one, two)
    assert found["chunks"] > 2 * 2
    # As long as the generator maps it, the trainer cannot free it.
    assert found["mapped"] == [False, False]
    assert found["refused"] == "policy version 3 lacks weights that the generator dropped before it"
    np.testing.assert_array_equal(found["checkpoint"].rollout_logprobs.values, plain)
