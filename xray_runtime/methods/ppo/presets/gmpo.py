"""GMPO, geometric-mean policy optimization (Zhao et al. 2025, arXiv 2507.20673).

    loss = −A · exp(mean_t m_t),   m_t = sgn A · min(sgn A · log ρ_t, ε)

A reply's loss is a geometric mean of its tokens' ratios, where GRPO's is the arithmetic one, so that one large ratio
does not rule it. Each is clipped by itself, to e^±ε with ε = `clip_range` = 0.4, on the side to which A pushes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from xray_runtime.algorithms.losses import PolicyLossInputs, TokenLoss


def gmpo(tokens: PolicyLossInputs) -> TokenLoss:
    from xray_runtime.algorithms.losses import TokenLoss, reply_means

    assert tokens.replies is not None
    sign = tokens.advantages.sign()
    signed = sign * tokens.log_ratio
    bounded = sign * signed.clamp(max=tokens.clip_range)
    mean = reply_means(bounded, tokens.replies, tokens.mask.to(tokens.logprobs.dtype))
    return TokenLoss(-tokens.advantages * mean.exp(), signed > tokens.clip_range)


PRESET = Preset(
    paper="Zhao et al. 2025 (arXiv 2507.20673)",
    differs="the geometric mean of a reply's clipped ratios, to e^±0.4, in place of the arithmetic one",
    fields=GROUPS | {"loss": "gmpo", "loss_mean": "replies", "clip_range": 0.4, "kl": NO_KL},
    loss=gmpo,
)
