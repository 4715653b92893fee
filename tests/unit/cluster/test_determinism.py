"""What `runtime.reproducible` and `runtime.tf32` set; torch keeps its switches for CUDA without a GPU too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from xray_runtime.cluster.pool.libraries import configure_torch, cuda_environment
from xray_runtime.engines.generators.vllm.loading import environment
from xray_runtime.engines.trainers.deepspeed.setup import REDUCE_BUCKET, communication
from xray_runtime.kernel.config.section import RuntimeConfig

EXACT = RuntimeConfig(device="cuda", reproducible=True)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    configure_torch(RuntimeConfig(device="cpu"), "cpu", samples=False)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = torch.backends.cuda.matmul.allow_tf32 = False


def switches() -> tuple[bool, bool, bool]:
    """(deterministic algorithms, only with warnings, deterministic cuDNN)."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns, torch.backends.cudnn.deterministic


@pytest.mark.parametrize(
    ("runtime", "device", "samples", "expected"),
    [
        # Flash attention's backward pass is deterministic only without `warn_only`.
        (EXACT, "cuda", False, (True, False, True)),
        (EXACT, "cuda", True, (True, True, True)),
        # Half a promise would only cost speed.
        (RuntimeConfig(device="cuda"), "cuda", False, (False, False, False)),
        (RuntimeConfig(device="cpu"), "cpu", False, (True, True, False)),
    ],
)
def test_a_gpu_is_deterministic_if_asked_and_a_cpu_always(
    runtime: RuntimeConfig, device: str, samples: bool, expected: tuple[bool, bool, bool]
) -> None:
    configure_torch(runtime, device, samples=samples)
    assert switches() == expected


def test_one_switch_sets_what_libraries_read_at_their_start() -> None:
    assert cuda_environment(EXACT)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert cuda_environment(RuntimeConfig(device="cuda")) == {}
    assert environment("cuda", reproducible=True)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in environment("cuda")


def test_tf32_is_off_unless_asked_for() -> None:
    for tf32 in (True, False):
        configure_torch(RuntimeConfig(device="cuda", tf32=tf32), "cuda", samples=False)
        assert torch.backends.cuda.matmul.allow_tf32 == tf32


def test_gpu_options_are_in_gpu_keys_alone() -> None:
    assert RuntimeConfig(device="cpu", reproducible=True, tf32=True).in_keys() == {"device": "cpu", "threads": 2}
    assert EXACT.in_keys() == {"device": "cuda", "threads": 2, "reproducible": True, "tf32": False}


def test_gradients_are_reduced_during_the_backward_pass_on_gpus() -> None:
    assert communication("cpu", 10**12) == {"overlap_comm": False, "reduce_bucket_size": REDUCE_BUCKET}
    # Two buckets, which together are as large.
    assert communication("cuda", 10**12) == {"overlap_comm": True, "reduce_bucket_size": REDUCE_BUCKET // 2}
    assert communication("cuda", 1000)["reduce_bucket_size"] == 1000
