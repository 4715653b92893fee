"""MaxRL, maximum likelihood reinforcement learning (Tajwar et al. 2026, arXiv 2602.02710).

    A = (r − μ) / μ over each group; 0 where no reply has a reward

A prompt that is rarely solved counts for more, as in the likelihood of a right answer, where GRPO divides by the
deviation. It is made for rewards of 0 or 1; a group whose mean is negative teaches nothing either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.algorithms.estimators import AdvantageInputs


def max_rl(rollout: AdvantageInputs) -> Tensor:
    from xray_runtime.algorithms.groups import group_advantages, group_means

    means = group_means(rollout.scores, rollout.groups)
    return (group_advantages(rollout.scores, rollout.groups, "dr_grpo") / means.clamp(min=1e-12)).where(means > 0, 0.0)


PRESET = Preset(
    paper="Tajwar et al. 2026 (arXiv 2602.02710)",
    differs="advantages (r − μ)/μ, for rewards of 0 or 1",
    fields=GROUPS | {"advantages": "max_rl", "reward_scaling": "none", "kl": NO_KL},
    advantages=max_rl,
)
