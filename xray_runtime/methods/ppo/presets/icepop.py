"""IcePop (Ling team 2025, "Every step evolves", arXiv 2510.18855): GRPO without tokens on which generator and trainer
disagree.

The weight of a token is trainer / generator where that is in [0.5, 5], and 0 outside, on both sides: nothing is learned
from a token that the generator found much likelier than the trainer does, either.
"""

from __future__ import annotations

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

PRESET = Preset(
    paper="Ling team 2025 (arXiv 2510.18855)",
    differs="tokens whose weight of trainer over generator is outside [0.5, 5] are dropped",
    fields=GROUPS | {"importance_correction": "mask", "importance_floor": 0.5, "importance_cap": 5.0, "kl": NO_KL},
)
