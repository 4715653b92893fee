"""SAPO, soft adaptive policy optimization (Qwen team 2025, arXiv 2511.20347).

    loss = −(4/τ) σ(τ (ρ − 1)) A,   τ = 1 where A > 0, else 1.05

A smooth gate in place of the clip: at ρ = 1 its slope is 1, and it falls off on both sides; faster where A < 0, since
those steps raise many other tokens at random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.methods.ppo.preset import GROUPS, NO_KL, Preset

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.algorithms.losses import PolicyLossInputs

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05


def sapo(tokens: PolicyLossInputs) -> Tensor:
    rises = (tokens.advantages > 0).to(tokens.logprobs.dtype)
    tau = TAU_NEGATIVE + rises * (TAU_POSITIVE - TAU_NEGATIVE)
    return -4 / tau * (tau * (tokens.log_ratio.exp() - 1)).sigmoid() * tokens.advantages


PRESET = Preset(
    paper="Qwen team 2025 (arXiv 2511.20347)",
    differs="a sigmoid of the ratio in place of the clip",
    fields=GROUPS | {"loss": "sapo", "loss_mean": "replies", "kl": NO_KL},
    loss=sapo,
)
