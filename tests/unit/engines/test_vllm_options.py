"""The options of vLLM by device and number of ranks. Nothing here imports vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xray_runtime.engines.generators.vllm import sampler as vllm
from xray_runtime.engines.sampling import EngineRank
from xray_runtime.kernel.config.section import RuntimeConfig

RUNTIME = RuntimeConfig(gpu_memory_fraction=0.3)


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "kv_cache_bytes", lambda *args: 2**20)


def engine_options(rank: EngineRank, runtime: RuntimeConfig = RUNTIME) -> dict[str, Any]:
    return vllm.engine_options(Path("model"), 32, runtime, rank)


@pytest.mark.parametrize(("device", "world_size"), [("cuda", 4), ("cuda", 1), ("cpu", 2)])
def test_ranks_that_see_one_device_each_do_not_look_for_their_peers(device: str, world_size: int) -> None:
    options = engine_options(EngineRank(device, 0, world_size))
    assert options.get("disable_custom_all_reduce", False) == (world_size > 1)
    assert options.get("tensor_parallel_size", 1) == world_size


def test_a_gpu_gets_half_precision_graphs_and_a_share_of_its_memory() -> None:
    on_gpu, on_cpu = (engine_options(EngineRank(device)) for device in ("cuda", "cpu"))
    assert (on_gpu["dtype"], on_gpu["enforce_eager"], on_gpu["gpu_memory_utilization"]) == ("bfloat16", False, 0.3)
    assert (on_cpu["dtype"], on_cpu["enforce_eager"], "gpu_memory_utilization" in on_cpu) == ("float32", True, False)


@pytest.mark.parametrize(
    ("device", "reproducible", "caches"), [("cuda", False, True), ("cuda", True, False), ("cpu", True, True)]
)
def test_prefixes_are_kept_unless_bits_are_promised_that_they_may_change(
    device: str, reproducible: bool, caches: bool
) -> None:
    options = engine_options(EngineRank(device), RuntimeConfig(reproducible=reproducible))
    assert options["enable_prefix_caching"] == caches


def test_a_gpu_samples_as_many_sequences_at_a_time_as_are_planned() -> None:
    assert "max_num_seqs" not in engine_options(EngineRank("cuda"))
    assert engine_options(EngineRank("cuda"), RuntimeConfig(max_num_seqs=48))["max_num_seqs"] == 48
    assert engine_options(EngineRank("cpu"), RuntimeConfig(max_num_seqs=48))["max_num_seqs"] == vllm.SEQUENCES
