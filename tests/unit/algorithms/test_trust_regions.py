"""Trust regions, by hand in float64: what presets share."""

from __future__ import annotations

import math

import pytest
import torch

from xray_runtime.algorithms.losses import PolicyLossInputs
from xray_runtime.algorithms.trust_regions import binary_kl, kept_gradient


def test_what_is_outside_is_clipped_and_has_no_gradient() -> None:
    new = torch.tensor([0.75, 0.75, 0.5], dtype=torch.float64).log().requires_grad_()
    sampled = torch.tensor([0.5, 0.5, 0.01], dtype=torch.float64).log()
    advantages = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64)
    tokens = PolicyLossInputs(
        new, advantages, torch.ones(3), torch.arange(3), 0.2, 0.2, None, {"rollout_logprobs": sampled}
    )
    made = kept_gradient(tokens, torch.tensor([True, False, True]))
    assert made.clipped is not None
    assert made.clipped.tolist() == [False, True, False]
    # −2 · 1.5 ln .75; nothing; ρ = 50 counts as 20 by default.
    assert made.loss.tolist() == pytest.approx([-3 * math.log(0.75), 0.0, -20 * math.log(0.5)])
    assert torch.autograd.grad(made.loss.sum(), new)[0].tolist() == pytest.approx([-3.0, 0.0, -20.0])
    # ln 1.5 = .4054651, its square .1644020: half of it is added, also where nothing is kept.
    pulled = kept_gradient(tokens, torch.tensor([True, False, True]), cap=2.0, tau=0.5)
    assert pulled.loss[:2].tolist() == pytest.approx([-3 * math.log(0.75) + 0.0822010, 0.0822010], abs=1e-7)
    assert pulled.loss[2].item() == pytest.approx(-2 * math.log(0.5) + 0.5 * math.log(50) ** 2)


def test_binary_kl_of_certain_tokens() -> None:
    # Of p = 1 nothing is left to the others: −ln q. Of equals nothing; rounding makes no negative.
    p, q = torch.tensor([1.0, 0.5, 1.0, 0.3]).double(), torch.tensor([0.25, 0.75, 1.0, 0.3]).double()
    expected = [1.3862944, 0.1438410, 0.0, 0.0]
    assert binary_kl(p.log(), q.log()).tolist() == pytest.approx(expected, abs=1e-7)
    # In float32 too, where a log-probability is a little above 0.
    assert binary_kl(torch.tensor([1e-7]), torch.tensor([-0.5])).tolist() == pytest.approx([0.5], abs=1e-5)
