"""Attention as on CUDA, by torch's kernel for sequences of different lengths, against the CPU's. A stand-in in float64
takes the kernel's place, with the arguments that versions of torch know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.on_cuda import as_on_cuda, before_2_13, torch_2_13
from xray_runtime.models import packing

LENGTHS, PROMPTS, FIRST = (1, 7, 30, 19, 12), (1, 3, 10, 8, 8), (0, 1, 2, 3, 3)
"""Tokens of each sequence and of its prompt, and the first sequence with that prompt: the last two share theirs."""


@pytest.mark.parametrize("version", [before_2_13, torch_2_13])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("shared", [True, False])
def test_two_kernels_are_the_blocks(
    version: Callable[..., Tensor], heads: int, kv_heads: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(heads * kv_heads)
    prompts = packing.Prompts(torch.tensor(FIRST), torch.tensor(PROMPTS)) if shared else None
    trees = packing.Trees.of(torch.tensor(LENGTHS), prompts)
    assert len(trees.suffixes) == 2 * shared
    row = [torch.randn(1, n, len(trees.computed), 8, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    grad = torch.randn(1, len(trees.computed), heads, 8, dtype=torch.float64)

    def outcome(attend: Callable[..., Any]) -> list[Tensor]:
        given = [x.clone().requires_grad_() for x in row]
        out, _ = attend(None, *given, None, trees=trees, scaling=0.3)
        out.backward(grad)
        return [out, *(x.grad for x in given if x.grad is not None)]

    expected = outcome(packing._attention)
    as_on_cuda(monkeypatch, version)
    for found, wanted in zip(outcome(packing._attention), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
