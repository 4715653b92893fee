"""Score centering (2026, arXiv 2609.20807): a policy gradient without the drift of a sampler that is not the policy.

Where an advantage says nothing (A = 1 for every token) a policy gradient should move nothing: E_p[∇log p] = 0. But
tokens are drawn from the sampler's q, and E_q[w ∇log p] is not 0 unless the weights w are p/q exactly. At each step
that moves the policy, by the mismatch alone. Here the loss gets A · C, whose gradient is A · E_q[w ∇log p]: of the H
likeliest tokens of the sampler by their own probabilities, of all others as if there q = s p.

Deviation from the paper: the weights may also be those that drop tokens outside a band (IcePop's).

Shapes: N tokens, k of the sampler's likeliest tokens in the place of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xray_runtime.algorithms.importance import Mode

LEAST_REST = 1e-6
"""The policy's probability of all other tokens counts as this at least."""


def score_centering(logprobs: Tensor, topk_logprobs: Tensor, *, mode: Mode, cap: float, floor: float = 0.0) -> Tensor:
    """C of each token [N], with C = Σ_H sg(c) log p and s = (1 − Σ_H q) / max(1 − Σ_H p, `LEAST_REST`).

    mode     weights w of the loss            c
    none     1                                q − s p
    truncate clamp(p/q, floor, cap)           clamp(p, floor q, cap q) − clamp(1, floor s, cap s) p
    mask     p/q in [floor, cap], else 0      p where floor q ≤ p ≤ cap q, else 0, − p where floor s ≤ 1 ≤ cap s, else 0

    With exact weights (`truncate` with cap = ∞) c is 0.

    Args:
        logprobs: the policy's, of the sampler's likeliest tokens [N, k], with gradient.
        topk_logprobs: the sampler's own [N, k]; both of one set of tokens, the whole vocabulary or a kept set.
        mode, cap, floor: as of `importance_weights`.
    """
    p, q = logprobs.detach().exp(), topk_logprobs.detach().exp()
    rest_p, rest_q = (1 - p.sum(-1, keepdim=True)), (1 - q.sum(-1, keepdim=True)).clamp(min=0)
    s = rest_q / rest_p.clamp(min=LEAST_REST)
    if mode == "none":
        coefficient = q - s * p
    elif mode == "truncate":
        coefficient = _clamped(p, floor * q, cap * q) - _clamped(torch.ones_like(s), floor * s, cap * s) * p
    else:
        inside = (p >= floor * q) & (p <= cap * q)
        rest_inside = (floor * s <= 1) & (cap * s >= 1)
        coefficient = p * inside - p * rest_inside
    return (coefficient * logprobs).sum(-1)


def _clamped(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, low), high)
