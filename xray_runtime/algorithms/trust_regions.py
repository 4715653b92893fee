"""Trust regions by the sampler's own probabilities: π is the policy's of a token, μ what the generator gave it."""

from __future__ import annotations

import torch
from torch import Tensor

from xray_runtime.algorithms.losses import PolicyLossInputs, TokenLoss


def kept_gradient(tokens: PolicyLossInputs, kept: Tensor, *, cap: float = 20.0, tau: float = 0.0) -> TokenLoss:
    """−A · sg(min(π/μ, `cap`)) · log π where `kept` [R] bool, plus `tau` · log²(π/μ) at every token."""
    log_ratio = tokens.rollout_log_ratio
    ratio = log_ratio.detach().exp().clamp(max=cap)
    gradient = -tokens.advantages * ratio * tokens.logprobs * kept.detach()
    return TokenLoss(gradient + tau * log_ratio.square() if tau else gradient, ~kept)


def binary_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """p ln(p/q) + (1 − p) ln((1 − p)/(1 − q)) ≥ 0, of a token against all others; any shape."""
    # Rounding may leave nothing to the others, or less.
    tiny = torch.finfo(logp.dtype).tiny
    rest_p, rest_q = (-torch.expm1(logp)).clamp(min=tiny), (-torch.expm1(logq)).clamp(min=tiny)
    return (logp.exp() * (logp - logq) + rest_p * (rest_p.log() - rest_q.log())).clamp(min=0)
