"""Which way weights take, by where trainer and generator are."""

from __future__ import annotations

import pytest

from xray_runtime.config.engines import GeneratorConfig
from xray_runtime.weights.device_transfer import Device, Transport, choose

CPU = [Device("a")]
GPU_0, GPU_1 = Device("a", "GPU-0"), Device("a", "GPU-1")
VLLM = GeneratorConfig()


@pytest.mark.parametrize(
    ("trainer", "generator", "way"),
    [
        (CPU, CPU, "plasma"),
        ([GPU_0], CPU, "plasma"),
        ([GPU_0], [GPU_0], "ipc"),
        ([GPU_0, GPU_1], [GPU_1], "ipc"),
        ([GPU_0], [GPU_1], "nccl"),
        # Of two generator ranks one shares the trainer's device: neither of vLLM's ways serves both.
        ([GPU_0], [GPU_0, GPU_1], "plasma"),
    ],
)
def test_the_shortest_way_is_taken(trainer: list[Device], generator: list[Device], way: Transport) -> None:
    assert choose("auto", VLLM, trainer, generator) == way
    assert choose(way, VLLM, trainer, generator) == way
    assert choose("plasma", VLLM, trainer, generator) == "plasma"
    assert choose("auto", GeneratorConfig(engine="transformers"), trainer, generator) == "plasma"


@pytest.mark.parametrize("wanted", ["nccl", "ipc"])
def test_what_cannot_work_is_refused(wanted: Transport) -> None:
    with pytest.raises(ValueError, match=rf"runtime.weight_transfer: '{wanted}' needs .*; available here: 'plasma'"):
        choose(wanted, VLLM, CPU, CPU)
