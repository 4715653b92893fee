"""Losses as sums over valid tokens, each with the sums behind its statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from xray_runtime.algorithms.kl import clamp_log_ratio, kl_estimate


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    dual_clip: float | None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (Schulman et al. 2017), with the dual clip of Ye et al. 2020.

    −min(ρ A, clip(ρ, 1 ± ε) A) with ρ = exp(logp − old); where A < 0 the loss is at most −c A (c = `dual_clip`).

    Args:
        logprobs, old_logprobs, advantages, mask: one common shape; `old_logprobs` are the trainer's own, before
            the rollout's first update.
        weights: per-token importance weights of the trainer's old policy to the one that sampled, or None.

    Returns:
        (sum of the loss over valid tokens, sums: `clip_count`, `dual_clip_count`, `approx_kl_sum` (k3 of old ‖ new)).
    """
    valid = mask.to(logprobs.dtype)
    ratio = clamp_log_ratio(logprobs - old_logprobs).exp()
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    loss = -torch.minimum(plain, clipped)
    dual = torch.zeros_like(mask, dtype=torch.bool)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    if weights is not None:
        loss = loss * weights
    with torch.no_grad():
        stats = {
            "clip_count": ((clipped < plain) * valid).sum(),
            "dual_clip_count": (dual * valid).sum(),
            "approx_kl_sum": (kl_estimate(old_logprobs, logprobs, "k3") * valid).sum(),
        }
    return (loss * valid).sum(), stats


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """½ · max((v − R)², (clip(v, v_old ± ε) − R)²), summed over valid tokens; sums: `value_clip_count`."""
    valid = mask.to(values.dtype)
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    plain, clipped = (values - returns).square(), (near - returns).square()
    loss = 0.5 * torch.maximum(plain, clipped)
    return (loss * valid).sum(), {"value_clip_count": ((clipped > plain) * valid).sum().detach()}
