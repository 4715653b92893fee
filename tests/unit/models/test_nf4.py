"""Linear layers in 4 bits: codes and values by hand, products and gradients as a plain layer of the rounded matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.unit.models.families import model
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import load_model
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.nf4 import LEVELS, NF4Linear, dequantize, quantize

TEXTS = torch.tensor([5, 9, 7, 42, 8, 3, 8, 100, 3, 11, 250, 7]), torch.tensor([6, 6])


def test_codes_by_hand() -> None:
    # The largest magnitude is 2: −2 → −1 (0), 0 → 0 (7), 2 → 1 (15), 0.17 → 0.085, between 0.0796 (8) and 0.1609 (9).
    codes, largest = quantize(torch.tensor([[-2.0, 0.0], [2.0, 0.17], [0.32, 0.0]]))
    assert largest.tolist() == [2.0]
    assert codes.tolist() == [0x07, 0xF8, 0x97]
    values = dequantize(codes, largest, torch.Size([3, 2]))
    assert values.flatten().tolist() == pytest.approx([-2.0, 0.0, 2.0, 2 * LEVELS[8], 2 * LEVELS[9], 0.0], rel=1e-6)


def test_every_element_becomes_the_nearest_value_of_its_block() -> None:
    weight = torch.randn(7, 130, generator=torch.Generator().manual_seed(0)) / 50
    weight[0, :64] = 0.0
    codes, largest = quantize(weight)
    assert (codes.numel(), largest.numel()) == (455, 15)
    rounded = dequantize(codes, largest, weight.shape)
    for number, (block, found) in enumerate(zip(weight.flatten().split(64), rounded.flatten().split(64), strict=True)):
        values = block.abs().max() * torch.tensor(LEVELS)
        nearest = values[(block[:, None] - values).abs().argmin(1)]
        torch.testing.assert_close(found, nearest, rtol=1e-6, atol=0, msg=f"block {number}")
    assert all(torch.equal(a, b) for a, b in zip(quantize(rounded), (codes, largest), strict=True))


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_layer_computes_with_the_rounded_matrix(kind: Any) -> None:
    base = nn.Linear(24, 40) if kind is nn.Linear else Conv1D(40, 24)
    layer = NF4Linear(base, base.weight.detach()).bfloat16().float()  # engines cast what is floating-point
    layer.bias = base.bias
    base.weight.data = layer.matrix()
    assert torch.equal(layer.matrix(), dequantize(*quantize(base.weight.detach()), base.weight.shape))
    x = torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ours, theirs = layer(x), base(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(out.pow(2).sum(), x)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_adapters_on_rounded_matrices(tmp_path: Path) -> None:
    """Off, and merged as they begin, they are the model with rounded matrices."""
    model("llama", vocab_size=300).float().save_pretrained(tmp_path)
    lm: Any = load_model(tmp_path)
    adapters = Adapters(lm, LoRAConfig(rank=2, quantize="nf4"), tmp_path, seed=0)
    module = HeadedLM(lm, adapters=adapters)
    rounded: Any = load_model(tmp_path)
    merged = dict(adapters.merged(lambda name, parameter: parameter.data))
    for name, weight in merged.items():
        whole = rounded.get_parameter(name)
        assert torch.equal(weight, dequantize(*quantize(whole.detach()), whole.shape))
        whole.data = weight
    assert len(merged) == 7 * len(lm.model.layers)
    expected = HeadedLM(rounded).hidden(*TEXTS)
    torch.testing.assert_close(module.hidden(*TEXTS), expected, rtol=1e-5, atol=1e-6)
    with adapters.off():
        torch.testing.assert_close(module.hidden(*TEXTS), expected, rtol=1e-5, atol=1e-6)
    assert not any("base_layer" in name for name, _ in module.named_parameters())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dora": True}, "needs the norms of whole matrices"),
        ({"publish": "adapter"}, "the base has other weights"),
        ({"target_modules": ["experts"]}, "are no linear layers"),
    ],
    ids=["DoRA", "an adapter alone", "experts"],
)
def test_what_cannot_be_quantized(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        LoRAConfig(quantize="nf4", **fields)
