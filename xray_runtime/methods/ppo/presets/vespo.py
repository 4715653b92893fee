"""VESPO, variational sequence-level soft policy optimization (arXiv 2602.10693).

    loss = −A · sg(φ(W)) · log π,   φ(W) = W^k e^{λ (1 − W)},   W = Π_t π_t/μ_t over the reply

μ is the sampler's own probability. φ(1) = 1, and the weight of a reply that has become much likelier or unlikelier
vanishes smoothly: k = 2, λ = 3 where A ≥ 0, else k = 3, λ = 2. W is bounded to [1e-8, e^20], as in TRL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.algorithms.losses import PolicyLossInputs

K_POSITIVE, LAMBDA_POSITIVE, K_NEGATIVE, LAMBDA_NEGATIVE = 2.0, 3.0, 3.0, 2.0
SMALLEST, LARGEST = -18.420680743952367, 20.0
"""Bounds of ln W; the first is ln 1e-8."""


def vespo(tokens: PolicyLossInputs) -> Tensor:
    from xray_runtime.algorithms.losses import reply_sums

    assert tokens.replies is not None
    valid = tokens.mask.to(tokens.logprobs.dtype)
    log_w = reply_sums(tokens.rollout_log_ratio.detach(), tokens.replies, valid).clamp(SMALLEST, LARGEST)
    rises = (tokens.advantages >= 0).to(valid.dtype)
    k = K_NEGATIVE + rises * (K_POSITIVE - K_NEGATIVE)
    scale = LAMBDA_NEGATIVE + rises * (LAMBDA_POSITIVE - LAMBDA_NEGATIVE)
    return -tokens.advantages * (k * log_w + scale * (1 - log_w.exp())).exp() * tokens.logprobs


PRESET = Preset(
    paper="VESPO 2026 (arXiv 2602.10693)",
    differs="a smooth weight of the whole reply's ratio to the sampler, which vanishes on both sides, and no clip",
    fields=GROUPS | {"loss": "vespo", "importance_correction": "none", "kl": NO_KL},
    loss=vespo,
    anchored=True,
)
