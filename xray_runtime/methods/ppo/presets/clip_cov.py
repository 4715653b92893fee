"""Clip-Cov: "The entropy mechanism of RL for reasoning language models" (Cui et al. 2025, arXiv 2505.22617).

    loss = −min(ρ A, clip(ρ, 0, 2) A) · (1 − chosen)
    chosen = r · N random tokens of those with (log π − mean log π) (A − mean A) in [1, 5]

Likely tokens with a high advantage are those that use up the entropy; a few of them learn nothing in an iteration. N is
the number of tokens, r = 2e-4. Deviation: as in `kl_cov`, over the rollout and its policy. At least one token is chosen
where there are any.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.algorithms.chosen_tokens import RolloutTokens
    from xray_runtime.algorithms.losses import PolicyLossInputs, TokenLoss

SHARE, LOWEST, HIGHEST = 2e-4, 1.0, 5.0
"""r, and ω_low and ω_high."""


def clip_cov(tokens: PolicyLossInputs) -> TokenLoss:
    from xray_runtime.algorithms.losses import ppo_loss

    made, chosen = ppo_loss(tokens), tokens.chosen.bool()
    assert made.clipped is not None
    return replace(made, loss=made.loss.where(~chosen, 0.0), clipped=made.clipped | chosen)


def some_of_large_covariances(tokens: RolloutTokens) -> Tensor:
    from xray_runtime.algorithms.chosen_tokens import covariances, first_of

    found = covariances(tokens)
    allowed = (found >= LOWEST) & (found <= HIGHEST)
    return first_of(tokens.draws(), allowed, max(int(SHARE * int(tokens.mask.sum())), 1))


PRESET = Preset(
    paper="Cui et al. 2025 (arXiv 2505.22617), Clip-Cov",
    differs="the ratio is clipped to [0, 2]; 0.02% of tokens, drawn of those that use up much entropy, are dropped",
    fields=GROUPS | {"loss": "clip_cov", "clip_range": 1.0, "kl": NO_KL},
    loss=clip_cov,
    chooses=some_of_large_covariances,
)
