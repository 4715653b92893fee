"""Clipping before a step has torch's bits, and does not touch gradients that are short enough."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from xray_runtime.engines.adamw import clip_gradients


@pytest.mark.parametrize(("limit", "touched"), [(1.0, True), (5.0, True), (5.1, False), (1e6, False)])
def test_gradients_are_clipped_to_torchs_bits(limit: float, touched: bool) -> None:
    found, expected = ([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))] for _ in range(2))
    for parameters in (found, expected):
        parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([0.0, 4.0])  # of length 5
    before = [parameter.grad._version for parameter in found if parameter.grad is not None]
    clip_gradients(found, limit, torch.tensor(5.0))
    nn.utils.clip_grad_norm_(expected, limit)
    assert [parameter.grad.tolist() for parameter in found if parameter.grad is not None] == [
        parameter.grad.tolist() for parameter in expected if parameter.grad is not None
    ]
    changes = [parameter.grad._version for parameter in found if parameter.grad is not None]
    assert (changes != before) == touched
