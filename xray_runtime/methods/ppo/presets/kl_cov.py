"""KL-Cov: "The entropy mechanism of RL for reasoning language models" (Cui et al. 2025, arXiv 2505.22617).

    loss = −ρ A + β |log ρ| · chosen,   chosen = the k · N tokens with the largest (log π − mean log π) (A − mean A)

Likely tokens with a high advantage are those that use up the entropy; they are held where they were. N is the number of
tokens; k = 2e-3 is the paper's setting for 7B (2e-4 for 32B), β = 1; |log ρ| is the KL as its authors compute it.
Deviation: means and choice are over the rollout and its policy, not over a micro-batch and the policy at that step, so
that the split does not matter. At least one token is chosen, and none whose product is not positive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.algorithms.chosen_tokens import RolloutTokens
    from xray_runtime.algorithms.losses import PolicyLossInputs

SHARE, BETA = 2e-3, 1.0
"""k and β."""


def kl_cov(tokens: PolicyLossInputs) -> Tensor:
    log_ratio = tokens.log_ratio
    return BETA * log_ratio.abs() * tokens.chosen - log_ratio.exp() * tokens.advantages


def largest_covariances(tokens: RolloutTokens) -> Tensor:
    from xray_runtime.algorithms.chosen_tokens import covariances, first_of

    found = covariances(tokens)
    return first_of(-found, found > 0, max(int(SHARE * int(tokens.mask.sum())), 1))


PRESET = Preset(
    paper="Cui et al. 2025 (arXiv 2505.22617), KL-Cov",
    differs="no clip; the 0.2% of tokens that use up most entropy are held by a KL",
    fields=GROUPS | {"loss": "kl_cov", "kl": NO_KL},
    loss=kl_cov,
    chooses=largest_covariances,
)
