"""DPPO with the binary KL (arXiv 2602.04879): as `dppo_tv`, but for the trust region.

    D = μ ln(μ/π) + (1 − μ) ln((1 − μ)/(1 − π)),  of the token against all others
    keep = 0 where D > δ and the step would go on in that direction: A > 0 with π > μ, A < 0 with π < μ

δ is `clip_range` below μ and `clip_range_high` above. μ = .5, π = .75: D = .1438410.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from xray_runtime.algorithms.losses import PolicyLossInputs, TokenLoss


def dppo_kl(tokens: PolicyLossInputs) -> TokenLoss:
    from xray_runtime.algorithms.trust_regions import binary_kl, kept_gradient

    divergence = binary_kl(tokens.rollout_logprobs, tokens.logprobs)
    moved, rises = tokens.logprobs - tokens.rollout_logprobs, tokens.advantages > 0
    above = rises & (moved > 0) & (divergence > tokens.clip_range_high)
    below = ~rises & (moved < 0) & (divergence > tokens.clip_range)
    return kept_gradient(tokens, ~(above | below))


PRESET = Preset(
    paper="DPPO, binary KL (arXiv 2602.04879)",
    differs="a token is dropped once the KL of its probability to the sampler's exceeds 0.05",
    fields=GROUPS | {"loss": "dppo_kl", "clip_range": 0.05, "importance_correction": "none", "kl": NO_KL},
    loss=dppo_kl,
    anchored=True,
)
