"""DRPO: "Rethinking the divergence regularization in LLM RL" (Yao et al. 2026, arXiv 2606.09821).

    loss = −(ρ A − |A| / (2δ) · μ (ρ − 1)²),   ρ = π/μ

μ is the sampler's own probability. In place of DPPO's mask: the weight of a token's gradient falls linearly and is 0 at
π − μ = ±δ, in the direction of A, and beyond it points back. δ is `clip_range_high`, the same on both sides.
The paper's reported runs take δ = 12.5, which no probability reaches: there it only damps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.algorithms.losses import PolicyLossInputs


def drpo(tokens: PolicyLossInputs) -> Tensor:
    ratio, advantages = tokens.rollout_log_ratio.exp(), tokens.advantages
    penalty = advantages.abs() * tokens.rollout_logprobs.exp() * (ratio - 1).square() / (2 * tokens.clip_range_high)
    return penalty - ratio * advantages


PRESET = Preset(
    paper="Yao et al. 2026 (arXiv 2606.09821)",
    differs="a quadratic penalty of the move from the sampler's probability in place of the clip",
    fields=GROUPS | {"loss": "drpo", "clip_range_high": 12.5, "importance_correction": "none", "kl": NO_KL},
    loss=drpo,
    anchored=True,
)
