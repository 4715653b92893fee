"""DPPO with binary total variation: "Rethinking the trust region in LLM reinforcement learning" (arXiv 2602.04879).

    loss = −A · sg(min(π/μ, 20)) · log π · keep
    keep = 0 where A > 0 and π − μ > δ_high, or A < 0 and π − μ < −δ_low; else 1

μ is the sampler's own probability of the token, so the policy is not scored before the update. δ_low is `clip_range`,
δ_high `clip_range_high`. A rare token may grow threefold (μ = .01, π = .03), which a clipped ratio would stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from xray_runtime.algorithms.losses import PolicyLossInputs, TokenLoss


def dppo_tv(tokens: PolicyLossInputs) -> TokenLoss:
    from xray_runtime.algorithms.trust_regions import kept_gradient

    moved, rises = tokens.logprobs.exp() - tokens.rollout_logprobs.exp(), tokens.advantages > 0
    beyond = (rises & (moved > tokens.clip_range_high)) | (~rises & (moved < -tokens.clip_range))
    return kept_gradient(tokens, ~beyond)


PRESET = Preset(
    paper="DPPO, binary total variation (arXiv 2602.04879)",
    differs="a token is dropped once its probability, not its ratio, has moved by 0.15 from the sampler's",
    fields=GROUPS | {"loss": "dppo_tv", "clip_range": 0.15, "importance_correction": "none", "kl": NO_KL},
    loss=dppo_tv,
    anchored=True,
)
