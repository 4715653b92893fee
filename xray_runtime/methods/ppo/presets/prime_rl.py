"""prime-rl's default loss since its 0.9, which it calls IPO; it is not the IPO of Azar et al. (`dpo`'s `loss: ipo`).

    loss = −A · sg(π/μ) · log π · keep + τ log²(π/μ),   keep = 0 where |π − μ| > δ, whatever A's sign

μ is the sampler's own probability, δ `clip_range`. The second term (Kimi K2.5) holds back all tokens, dropped ones too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from xray_runtime.algorithms.losses import PolicyLossInputs, TokenLoss

TAU = 1e-3


def prime_rl(tokens: PolicyLossInputs) -> TokenLoss:
    from xray_runtime.algorithms.trust_regions import kept_gradient

    moved = tokens.logprobs.exp() - tokens.rollout_logprobs.exp()
    return kept_gradient(tokens, moved.abs() <= tokens.clip_range, cap=math.inf, tau=TAU)


PRESET = Preset(
    paper="prime-rl 0.9, `default` loss",
    differs="r − μ as advantages; a token is dropped once its probability has moved by 0.3; τ log² of the ratio",
    fields=GROUPS
    | {
        "advantages": "dr_grpo",
        "loss": "prime_rl",
        "clip_range": 0.3,
        "importance_correction": "none",
        "kl": NO_KL,
    },
    loss=prime_rl,
    anchored=True,
)
