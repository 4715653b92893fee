"""The sync by CUDA IPC of every model of docs/planning-table.md, by vLLM's own producer over tensors without memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xray_runtime.engines.generator import Receivers
from xray_runtime.engines.generators.vllm.send import Sender

GIB = 2**30
MODELS = {
    # Name: (vocabulary, hidden, intermediate, key-value width, layers); both embeddings where they are not tied.
    "Qwen2.5-0.5B": (151_936, 896, 4864, 128, 24),
    "Qwen2.5-7B": (152_064, 3584, 18_944, 512, 28),
    "Llama-3.2-1B": (128_256, 2048, 8192, 512, 16),
    "Llama-3.2-3B": (128_256, 3072, 8192, 1024, 28),
    "Llama-3.1-8B": (128_256, 4096, 14_336, 1024, 32),
    "Qwen3-8B": (151_936, 4096, 12_288, 1024, 36),
    "Qwen3-32B": (151_936, 5120, 25_600, 1024, 64),
    "Llama-3.1-70B": (128_256, 8192, 28_672, 1024, 80),
}
LARGEST = {
    # In bfloat16: 152,064 · 3,584 · 2, 151,936 · 4,096 · 2, … Smaller ones get vLLM's gibibyte.
    "Qwen2.5-7B": 1_089_994_752,
    "Qwen3-8B": 1_244_659_712,
    "Qwen3-32B": 1_555_824_640,
    "Llama-3.1-70B": 2_101_346_304,
}

SHORT = ("Qwen2.5-0.5B", "Qwen3-8B")


def tensors(name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a Llama in float32, as a trainer gathers them."""
    vocabulary, hidden, intermediate, width, layers = MODELS[name]
    shapes = {"embed": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(layers):
        shapes |= {f"{layer}.{each}": (hidden, hidden) for each in ("q", "o")}
        shapes |= {f"{layer}.{each}": (width, hidden) for each in ("k", "v")}
        shapes |= {f"{layer}.{each}": (intermediate, hidden) for each in ("gate", "up")}
        shapes |= {f"{layer}.down": (hidden, intermediate), f"{layer}.norm": (hidden,)}
    for each, shape in shapes.items():
        yield each, torch.empty(shape, device="meta")


class Client:
    """All generator ranks."""

    version = 0

    def __init__(self) -> None:
        self.names: list[str] = []
        self.steps: list[str] = []

    def init_weight_transfer_engine(self, info: Any) -> None:
        self.steps.append("init")

    def start_weight_update(self) -> None:
        self.steps.append("start")

    def update_weights(self, info: Any) -> None:
        self.names += info["names"]

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.steps.append("finish")


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in MODELS]
)
def test_the_buffer_holds_the_largest_tensor(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import packed_tensor

    made: list[int] = []
    empty = torch.empty

    def buffer(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("device") != "cuda":
            return empty(*size, **options)
        made.append(size[0])
        return empty(*size, **options | {"device": "meta"})

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch, "empty", buffer)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda tensor: (None, ()))
    monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
    monkeypatch.setattr("torch.cuda.ipc_collect", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    sender, client = Sender("ipc", lambda: tensors(model), 0, Receivers(0, 1, lambda *_: None)), Client()
    sender._client = client  # type: ignore[assignment]
    sender.send(1, ("127.0.0.1", 1))
    assert client.steps == ["init", "start", "finish"]
    assert client.names == [name for name, _ in tensors(model)]
    assert made == [LARGEST.get(model, GIB)]
