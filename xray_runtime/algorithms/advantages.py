"""From scores to advantages: reward placement, generalized advantage estimation, whitening."""

from __future__ import annotations

import torch
from torch import Tensor


def place_rewards(scores: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """Per-token rewards [B, T]: minus the penalty everywhere, plus the score on the last valid response token.

    Args:
        scores: [B] one score a reply.
        penalties: [B, T] per-token KL penalty, its weight included.
        mask: [B, T] valid response tokens. A row without any gets no reward.
    """
    valid = mask.to(scores.dtype)
    rewards = -penalties * valid
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask.bool(), positions, -1).amax(-1)
    rows = (last >= 0).nonzero(as_tuple=True)[0]
    rewards[rows, last[rows]] += scores[rows]
    return rewards


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, bootstrap_values: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016) over the valid tokens of each row.

    δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ A_{t+1};  R_t = A_t + V_t, where t + 1 is the next *valid* token:
    masked tokens in the middle carry value and advantage across unchanged, as if they were not there.

    Args:
        rewards, values, mask: [B, T].
        bootstrap_values: [B] value of the state after a row's last valid token; 0 where the reply ended, the critic's
            value where it was only cut off.

    Returns:
        (advantages [B, T], returns [B, T]), 0 at masked positions.
    """
    valid = mask.bool()
    advantages = torch.zeros_like(rewards)
    next_value, next_advantage = bootstrap_values, torch.zeros_like(bootstrap_values)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(valid[:, t], advantage, 0.0)
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        next_advantage = torch.where(valid[:, t], advantage, next_advantage)
    return advantages, torch.where(valid, advantages + values, 0.0)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` over `mask`; 0 when nothing is valid."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """`x` scaled to (population) deviation 1 over all valid tokens; 0 at masked ones.

    With `shift_mean` the mean becomes 0, else it is kept. A constant `x` becomes 0 (or its mean), exactly: in float32
    the mean of equal numbers may differ from them, and `eps` alone would turn that into up to 0.08.
    """
    kept = x[mask.bool()]
    mean = kept[0] if len(kept) and (kept == kept[0]).all() else masked_mean(x, mask)
    variance = masked_mean((x - mean).square(), mask)
    white = (x - mean) * torch.rsqrt(variance + eps)
    return (white if shift_mean else white + mean) * mask
