"""The generator and the trainer compute the same policy with different kernels; these weights make up for it.

Token-level truncated importance sampling (Espeholt et al. 2018; Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"): w = exp(logp_train_old − logp_rollout), capped, or masked beyond the cap. Where
the rollout is of an earlier policy version, w is also the weight of the decoupled objective (Hilton et al. 2021, "Batch
size-invariance for policy optimization"): proximal policy over behaviour policy.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from xray_runtime.algorithms.advantages import masked_mean
from xray_runtime.algorithms.kl import clamp_log_ratio

Mode = Literal["truncate", "mask", "none"]
Level = Literal["token", "reply"]


def importance_weights(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: Mode,
    cap: float,
    level: Level = "token",
    floor: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """Weights [B, T] and what they say of the mismatch. `level` "reply": w is the geometric mean over a reply.
    Mode "mask" drops weights below `floor` too (IcePop, Ling team 2025, arXiv 2510.18855).

    Stats: `mean_abs_diff` and `max_abs_diff` of log-probabilities, `effective_sample_share` = (Σw)² / (n Σw²),
    `capped_share` of tokens whose weight exceeded `cap` or, in mode "mask", fell below `floor`.
    """
    valid = mask.to(train_logprobs.dtype)
    diff = (train_logprobs - rollout_logprobs) * valid
    log_weights = diff
    if level == "reply":
        log_weights = (diff.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)) * valid
    raw = clamp_log_ratio(log_weights).exp() * valid
    count = valid.sum().clamp(min=1)
    stats = {
        "mean_abs_diff": float(masked_mean(diff.abs(), valid)),
        "max_abs_diff": float(diff.abs().max()) if diff.numel() else 0.0,
        "effective_sample_share": float(raw.sum().square() / (count * raw.square().sum().clamp(min=1e-12))),
        "capped_share": float((_outside(raw, cap, floor if mode == "mask" else 0.0) * valid).sum() / count),
    }
    if mode == "truncate":
        return raw.clamp(max=cap), stats
    return (torch.where(_outside(raw, cap, floor), 0.0, raw) if mode == "mask" else valid), stats


def _outside(raw: Tensor, cap: float, floor: float) -> Tensor:
    return (raw > cap) | (raw < floor)
