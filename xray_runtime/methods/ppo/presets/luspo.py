"""LUSPO, length-unbiased sequence policy optimization (Liu et al. 2026, arXiv 2602.05261).

GSPO's loss of a reply times its number of tokens: Σ_i |y_i| · −min(s_i A_i, clip(s_i) A_i) / n. GSPO's mean over a
reply's tokens gives each token of a long reply less, so that replies shrink. Ours divides by `max_new_tokens` too, a
constant.
"""

from __future__ import annotations

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

PRESET = Preset(
    paper="Liu et al. 2026 (arXiv 2602.05261)",
    differs="GSPO's ratio of a reply, whose loss counts once for each of its tokens",
    fields=GROUPS
    | {
        "loss": "gspo",
        "clip_range": 2e-3,
        "clip_range_high": 2.5e-3,
        "loss_mean": "fixed",
        "importance_level": "reply",
        "kl": NO_KL,
    },
)
