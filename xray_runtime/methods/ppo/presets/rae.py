"""RAE, role-conditioned advantage estimation of SPIRAL (Liu et al. 2025, arXiv 2506.24119), for self-play.

    A = r − b,   b ← α b + (1 − α) r   for each game, α = 0.95, b = 0 at first; one b for each seat

Seats of one game do not have the same chances, so each is measured by its own past and not by the other's. As in its
authors' code, b is that of before the game. Deviation: of before the rollout, whose games are then taken in with their
mean, so that their order does not show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.algorithms.estimators import AdvantageInputs


def rae(rollout: AdvantageInputs) -> Tensor:
    return rollout.scores - rollout.seat_means


PRESET = Preset(
    paper="SPIRAL, Liu et al. 2025 (arXiv 2506.24119)",
    differs="the reward minus the moving mean of its seat in earlier rollouts, and no group",
    fields=GROUPS
    | {"advantages": "rae", "samples_per_prompt": 1, "loss_mean": "fixed", "reward_scaling": "none", "kl": NO_KL},
    advantages=rae,
    compares=False,
)
