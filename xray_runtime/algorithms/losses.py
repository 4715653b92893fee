"""Losses as sums over valid tokens, each with the sums behind its statistics."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from xray_runtime.algorithms.kl import KLEstimator, clamp_log_ratio, kl_estimate

PolicyLoss = Literal["ppo", "gspo", "cispo"]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    dual_clip: float | None,
    weights: Tensor | None = None,
    clip_range_high: float | None = None,
    kind: PolicyLoss = "ppo",
    replies: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A surrogate of the policy gradient, by `kind`, with ρ = exp(logp − old).

    `ppo`: −min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A) (Schulman et al. 2017); where A < 0 it is at most −c A (c =
    `dual_clip`, Ye et al. 2020). `gspo`: the same with the geometric mean of ρ over a reply in place of ρ (Zheng et al.
    2025). `cispo`: −sg(min(ρ, 1 + ε_high)) A logp: the weight is clipped, no token loses its gradient (MiniMax 2025).

    Args:
        logprobs, old_logprobs, advantages, mask: one common shape; `old_logprobs` are the trainer's own, before
            the rollout's first update.
        weights: per-token importance weights of the trainer's old policy to the one that sampled, or None.
        clip_range_high: ε_high; None: ε.
        replies: which reply each token is of, from 0, for `gspo`; shapes are then [R].

    Returns:
        (sum of the loss over valid tokens, sums: `clip_count`, `dual_clip_count`, `approx_kl_sum` (k3 of old ‖ new)).
    """
    valid = mask.to(logprobs.dtype)
    log_ratio = clamp_log_ratio(logprobs - old_logprobs)
    if kind == "gspo":
        assert replies is not None
        log_ratio = reply_means(log_ratio, replies, valid)
    ratio, high = log_ratio.exp(), 1 + (clip_range if clip_range_high is None else clip_range_high)
    plain = ratio * advantages
    if kind == "cispo":
        clipped = ratio.clamp(max=high) * advantages
        loss = -clipped.detach() * logprobs
    else:
        clipped = ratio.clamp(1 - clip_range, high) * advantages
        loss = -torch.minimum(plain, clipped)
    dual = torch.zeros_like(mask, dtype=torch.bool)
    if dual_clip is not None and kind != "cispo":
        bound = -dual_clip * advantages
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    if weights is not None:
        loss = loss * weights
    with torch.no_grad():
        stats = {
            "clip_count": ((clipped != plain if kind == "cispo" else clipped < plain) * valid).sum(),
            "dual_clip_count": (dual * valid).sum(),
            "approx_kl_sum": (kl_estimate(old_logprobs, logprobs, "k3") * valid).sum(),
        }
    return (loss * valid).sum(), stats


def reply_means(x: Tensor, replies: Tensor, valid: Tensor) -> Tensor:
    """Of each token of [R] the mean of `x` over the valid tokens of its reply (0 without any); `replies` [R] are
    numbers from 0, `valid` [R] is 1 or 0."""
    size = int(replies.max()) + 1 if len(replies) else 0
    sums = x.new_zeros(size).index_add(0, replies, x * valid)
    counts = x.new_zeros(size).index_add(0, replies, valid)
    return (sums / counts.clamp(min=1))[replies]


def kl_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token terms whose expected gradient is that of KL(policy ‖ reference), any shape.

    An estimator alone has another one as a loss: k1's is 0, k3's that of the reverse KL. ρ k with ρ = exp(logp − old)
    differentiated has the right one for k1 and k3; k2 alone has it, weighted by ρ once the policy has moved.
    """
    ratio = clamp_log_ratio(logprobs - old_logprobs).exp()
    return (ratio.detach() if estimator == "k2" else ratio) * kl_estimate(logprobs, ref_logprobs, estimator)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """½ · max((v − R)², (clip(v, v_old ± ε) − R)²), summed over valid tokens; sums: `value_clip_count`."""
    valid = mask.to(values.dtype)
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    plain, clipped = (values - returns).square(), (near - returns).square()
    loss = 0.5 * torch.maximum(plain, clipped)
    return (loss * valid).sum(), {"value_clip_count": ((clipped > plain) * valid).sum().detach()}
