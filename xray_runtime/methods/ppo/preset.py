"""Presets: methods of single files, each with its paper's formula and setting, in `presets/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.plugs import Registry

if TYPE_CHECKING:
    from xray_runtime.algorithms.chosen_tokens import TokenChoice
    from xray_runtime.algorithms.estimators import AdvantageEstimator
    from xray_runtime.algorithms.losses import PolicyLoss

NO_KL: dict[str, Any] = {"controller": "fixed", "coef": 0.0}
GROUPS: dict[str, Any] = {
    "advantages": "grpo",
    "samples_per_prompt": 8,
    "epochs": 1,
    "dual_clip": None,
    "whiten_advantages": False,
}
"""Fields of the methods that compare the replies to one prompt and have no critic."""


@dataclass(frozen=True)
class Preset:
    """A published method. Its file is the only one that knows it, and counts in the keys of the stages that use it."""

    paper: str
    """Authors, year and arXiv number."""
    differs: str
    """The difference from GRPO, in a line."""
    fields: Mapping[str, Any]
    """Fields of the config that it sets, unless the config sets them."""
    loss: PolicyLoss | None = None
    """Its policy loss, which the config's `loss` calls by the preset's name."""
    advantages: AdvantageEstimator | None = None
    """Its estimator, which the config's `advantages` calls by the preset's name."""
    compares: bool = True
    """Whether its estimator compares the replies to one prompt."""
    chooses: TokenChoice | None = None
    """Chooses the tokens of a whole rollout that its loss reads as `chosen`."""
    anchored: bool = False
    """Whether its ratio is that to the sampler's own probabilities, so that there is nothing left to correct."""


PRESETS: Registry[Preset] = Registry("method", "xray_runtime.methods.ppo.presets", "PRESET", "xray.presets")
