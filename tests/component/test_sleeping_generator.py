"""A generator that sleeps, by vLLM's own executor and allocator without a GPU: what is on the device, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xray_runtime.engines.generators.vllm.sampler import VLLMSampler
from xray_runtime.engines.sampling import Sampling

SIZES = {"weights": 16, "kv_cache": 40}
SAMPLING = Sampling(4, 1.0, (1,), 0)


class Device:
    """Bytes that vLLM's allocator has mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Not at the top: every process that collects tests would import vLLM.
        from vllm.device_allocator import AllocationData, cumem

        self.mapped, self.log = sum(SIZES.values()), list[Any]()
        self.allocator = object.__new__(cumem.CuMemAllocator)
        handles = {tag: (0, size, number, 0) for number, (tag, size) in enumerate(SIZES.items())}
        self.allocator.pointer_to_data = {number: AllocationData(handles[tag], tag) for number, tag in enumerate(SIZES)}
        monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: self._map(-handle[1]))
        monkeypatch.setattr(cumem, "create_and_map", lambda handle: self._map(handle[1]))
        copies = SimpleNamespace(cudaMemcpy=lambda *of: self.log.append(("copy", of[2])))
        monkeypatch.setattr(cumem, "libcudart", copies)
        monkeypatch.setattr(cumem, "PIN_MEMORY", False)
        monkeypatch.setattr("gc.collect", lambda: 0)
        monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
        monkeypatch.setattr("torch.accelerator.empty_cache", lambda: None)
        monkeypatch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: self.allocator)

    def _map(self, size: int) -> None:
        self.mapped += size
        self.log.append(self.mapped)


def make_executor() -> Any:
    """vLLM's executor, with a worker that only sleeps."""
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class Executor(UniProcExecutor):
        def __init__(self) -> None:
            self.sleeping_tags, self._backend = set(), CuMemBackend()

        def collective_rpc(self, method: Any, *_: Any, kwargs: Any = None, **__: Any) -> Any:
            {"sleep": self._backend.suspend, "wake_up": self._backend.resume}[method](**kwargs)

    return Executor()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def sampler(device: Device) -> VLLMSampler:
    """A generator with `runtime.generator_sleeps`, asleep as after its start."""
    executor = make_executor()

    def generate(prompts: list[Any], *_: Any, **__: Any) -> list[Any]:
        assert not executor.is_sleeping
        device.log.append("generate")
        one = SimpleNamespace(token_ids=[1], logprobs=SimpleNamespace(logprobs=[-1.0]))
        return [SimpleNamespace(outputs=[one])] * len(prompts)

    def update(info: Any) -> None:
        assert "weights" not in executor.sleeping_tags
        device.log.append("update")

    found: Any = object.__new__(VLLMSampler)
    found._vllm = SimpleNamespace(SamplingParams=lambda **_: None)
    found._llm = SimpleNamespace(
        sleep=executor.sleep,
        wake_up=executor.wake_up,
        generate=generate,
        update_weights=update,
        start_weight_update=lambda: None,
        finish_weight_update=lambda version: None,
        reset_prefix_cache=lambda: True,
        collective_rpc=lambda call: [["a"]],
        model_config=SimpleNamespace(get_vocab_size=lambda: 8),
    )
    found._on_cpu, found._sleeps, found._stays_awake, found._asleep = False, True, False, set()
    found.sleep()
    device.log.clear()
    return found


def test_a_sync_wakes_the_weights_alone_and_the_cache_wakes_for_samples(device: Device) -> None:
    generator = sampler(device)
    assert device.mapped == 0
    generator.layers_of({"a"})
    generator.write(iter(()), 1)
    # The trained models are awake still.
    assert (device.mapped, device.log[-1]) == (16, "update")
    generator.wake_up()
    assert device.mapped == 16 + 40
    generator.sample([[2]], [0], SAMPLING)
    assert device.mapped == 56
    generator.sleep()
    assert device.mapped == 0


def test_it_sleeps_once_a_turn_and_else_after_each_sample(device: Device) -> None:
    generator = sampler(device)
    generator.wake_up()
    for _ in range(3):
        generator.sample([[2]], [0], SAMPLING)
    generator.sleep()
    # The weights are copied back and away once.
    assert device.log == [16, ("copy", 16), 56, *["generate"] * 3, ("copy", 16), 40, 0]
    device.log.clear()
    for _ in range(2):
        generator.sample([[2]], [0], SAMPLING)
        assert device.mapped == 0
    assert device.log.count(("copy", 16)) == 4


def test_weights_that_the_next_sync_brings_are_not_copied(device: Device) -> None:
    generator = sampler(device)
    generator.wake_up()
    device.log.clear()
    generator.sleep(drop=True)
    generator.write(iter(()), 1)
    assert device.log == [40, 0, 16, "update"]
