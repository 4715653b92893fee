"""Steps about the machine: versions, attention kernels."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from benchmarks.gpu_acceptance.setting import Setting, check
from xray_runtime.models.packing import ATTENTION, Prompts, Trees, use_packed_attention

LIBRARIES = (
    "torch",
    "transformers",
    "deepspeed",
    "megatron-core",
    "vllm",
    "ray",
    "trl",
    "flash-attn",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "triton",
    "pydantic",
    "numpy",
)
OLDEST_TORCH = (2, 11)
HEADS = ((4, 4, 64), (8, 2, 64), (8, 1, 128), (6, 2, 80), (4, 2, 96), (4, 2, 256))
"""(query heads, key-value heads, head size)."""
LENGTHS, PROMPTS, FIRST = (1, 7, 64, 129, 90), (1, 3, 10, 50, 50), (0, 1, 2, 3, 3)
"""Tokens of each sequence and of its prompt, and the first sequence with that prompt: the last two share theirs."""
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest entry: half precision has 8 bits."""


def versions(setting: Setting) -> dict[str, Any]:
    """Versions of all that computes, and the speed of a matrix product, by which other steps are judged."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    major, minor = torch.__version__.split(".")[:2]
    check((int(major), int(minor)) >= OLDEST_TORCH, f"torch {torch.__version__} must be at least 2.11")
    if setting.device == "cuda":
        device = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": device.name,
            "gpu_bytes": device.total_memory,
            "capability": f"{device.major}.{device.minor}",
            "num_gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return found | {f"{name}_tflops": matmul_flops(setting, dtype) / 1e12 for name, dtype in _DTYPES.items()}


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def matmul_flops(setting: Setting, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large square matrix product."""
    width, repeats = (128, 2) if setting.rehearse else (8192, 10)
    left = torch.randn(width, width, device=setting.device, dtype=dtype)
    out = left @ left
    _finish(setting)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.matmul(left, left, out=out)
    _finish(setting)
    return 2 * width**3 * repeats / (time.perf_counter() - start)


def _finish(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def attention(setting: Setting) -> dict[str, Any]:
    """Packed attention, forward and backward, against float64 sequence by sequence: head sizes, grouped queries."""
    use_packed_attention(torch.nn.Identity())
    errors: dict[str, float] = {}
    for name, dtype in _DTYPES.items():
        for heads in HEADS:
            errors[f"{name} {heads[0]}/{heads[1]} × {heads[2]}"] = error = _error(setting, dtype, *heads)
            check(error < LIMITS[dtype], f"{name}, {heads}: error {error:.2g} must be below {LIMITS[dtype]}")
    return {"largest_error": errors} | _long_attention(setting)


def _packed(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, prompts: Prompts | None = None) -> Tensor:
    """[N, a, d] by the product's attention, with shared prompts computed once."""
    trees = Trees.of(lengths, prompts)
    row = (x[:, :, trees.computed] for x in (q, k, v))
    out, _ = AttentionInterface()[ATTENTION](torch.nn.Identity(), *row, None, trees=trees)
    assert isinstance(out, Tensor)
    return out[0][trees.given]


def _exact(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """[N, a, d] by softmax of masked products, one sequence at a time."""
    groups, out = q.shape[1] // k.shape[1], []
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    for mine in zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True):
        scores = mine[0] @ mine[1].transpose(2, 3) / q.shape[-1] ** 0.5
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        out.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ mine[2])
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def _error(setting: Setting, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> float:
    """Largest relative error of output and gradients."""
    torch.manual_seed(heads * size)
    counts = (heads, kv_heads, kv_heads)
    given = [torch.randn(1, n, sum(LENGTHS), size).to(setting.device, dtype) for n in counts]
    exact = [x.double().requires_grad_() for x in given]
    ours = [x.requires_grad_() for x in given]
    # The last sequence begins with the tokens of the one before.
    same, last = torch.arange(sum(LENGTHS), device=setting.device), sum(LENGTHS[:-1])
    same[last : last + PROMPTS[-1]] -= LENGTHS[-2]
    prompts = Prompts(torch.tensor(FIRST, device=setting.device), torch.tensor(PROMPTS, device=setting.device))
    q, k, v = (x[:, :, same] for x in ours)
    found = _packed(q, k, v, torch.tensor(LENGTHS, device=setting.device), prompts)
    q, k, v = (x[:, :, same] for x in exact)
    expected = _exact(q, k, v, list(LENGTHS))
    weights = torch.randn_like(expected)
    (found.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs if a is not None and b is not None)


def _long_attention(setting: Setting) -> dict[str, Any]:
    """Time and extra memory of long sequences, where a kernel that keeps all scores would show."""
    tokens, count = (32, 2) if setting.rehearse else (4096, 4)
    found: dict[str, Any] = {}
    for name, dtype in _DTYPES.items():
        q, k, v = (torch.randn(1, n, tokens * count, 128).to(setting.device, dtype) for n in (16, 4, 4))
        lengths = torch.full((count,), tokens, device=setting.device)
        _packed(q, k, v, lengths)
        _finish(setting)
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if setting.device == "cuda" else 0
        start = time.perf_counter()
        _packed(q, k, v, lengths)
        _finish(setting)
        found[f"{name}_long_ms"] = 1000 * (time.perf_counter() - start)
        if setting.device == "cuda":
            found[f"{name}_long_extra_bytes"] = torch.cuda.max_memory_allocated() - before
    return found
