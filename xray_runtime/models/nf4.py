"""Frozen linear layers in 4 bits: normal floats of blocks (NF4; Dettmers et al. 2023, "QLoRA", appendix E).

Blocks of 64 elements in the order of memory are divided by their largest magnitude, and each element becomes the
nearest of 16 quantiles of a normal distribution. Two of these take a byte, the first in its upper half; a block's
magnitude stays float32 (the paper's second quantization of these is left out). Codes and values are bitsandbytes'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

BLOCK = 64
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [ceil(size / 2)] uint8, magnitudes [ceil(size / 64)]) of a float32 tensor."""
    flat = weight.float().flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    levels = torch.tensor(LEVELS, device=weight.device)
    scaled = (blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).flatten()
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return ((codes[::2] << 4) | codes[1::2])[: (len(flat) + 1) // 2], largest


def dequantize(codes: Tensor, largest: Tensor, shape: torch.Size) -> Tensor:
    """The float32 tensor of `shape`."""
    both = torch.stack([codes >> 4, codes & 15], 1).flatten()[: shape.numel()].int()
    values = torch.tensor(LEVELS, device=codes.device)[both]
    return (values * largest.repeat_interleave(BLOCK)[: shape.numel()]).view(shape)


class NF4Linear(nn.Module):
    """A frozen linear layer.

    Args:
        base: the layer, whose bias is kept as it is.
        weight: its float32 matrix.
    """

    codes: Tensor
    largest: Tensor

    def __init__(self, base: Any, weight: Tensor) -> None:
        super().__init__()
        self.transposed, self.shape = isinstance(base, Conv1D), weight.shape
        codes, largest = quantize(weight)
        self.register_buffer("codes", codes, persistent=False)
        # As bytes, which no engine casts to the precision of its passes.
        self.register_buffer("largest", largest.view(torch.uint8), persistent=False)
        self.bias = base.bias

    def matrix(self) -> Tensor:
        """The float32 matrix that passes compute with."""
        return dequantize(self.codes, self.largest.view(torch.float32), self.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., out] of inputs [..., in]."""
        product: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(x.dtype)


class _Product(torch.autograd.Function):
    """x Wᵀ, whose W is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        weight = layer.matrix().to(x.dtype)
        return x @ (weight if layer.transposed else weight.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        weight = ctx.layer.matrix().to(gradients[0].dtype)
        return gradients[0] @ (weight.T if ctx.layer.transposed else weight), None
