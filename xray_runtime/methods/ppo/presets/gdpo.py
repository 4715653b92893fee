"""GDPO, group reward-decoupled normalization policy optimization (NVIDIA 2026, arXiv 2601.05242).

    A = Σ_s w_s (r_s − μ_s) / σ_s over each group and source of reward, then whitened over the rollout

Sums of rewards lose which of them differ: (1, 0) and (0, 1) sum to the same. Here each source is compared by itself;
one that does not apply to a reply adds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.algorithms.estimators import AdvantageInputs


def gdpo(rollout: AdvantageInputs) -> Tensor:
    from xray_runtime.algorithms.groups import group_advantages

    total = rollout.scores.new_zeros(len(rollout.scores)).double()
    for scores, weight in zip(rollout.sources.unbind(1), rollout.source_weights, strict=True):
        total = total + weight * group_advantages(scores, rollout.groups, "grpo")
    return total


PRESET = Preset(
    paper="NVIDIA 2026 (arXiv 2601.05242)",
    differs="each source of reward is normalized in its group by itself, then summed and whitened",
    fields=GROUPS | {"advantages": "gdpo", "whiten_advantages": True, "reward_scaling": "none", "kl": NO_KL},
    advantages=gdpo,
)
