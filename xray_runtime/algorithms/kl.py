"""KL between policy and reference: per-token estimators and the controllers of its weight.

With x sampled from the policy and r = logp(x) − ref(x), all three estimate KL(policy ‖ reference)
(Schulman 2020, "Approximating KL divergence"): k1 = r (unbiased), k2 = ½ r², k3 = e^−r − 1 + r (unbiased, ≥ 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from xray_runtime.kernel.errors import NonFiniteError

KLEstimator = Literal["k1", "k2", "k3"]
LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before they are exponentiated or squared."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log_ratio` within ± LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference), any shape, in nats."""
    r = clamp_log_ratio(logprobs - ref_logprobs)
    if estimator == "k1":
        return r
    if estimator == "k2":
        return 0.5 * r.square()
    return torch.expm1(-r) + r


@dataclass
class KLController:
    """The weight of the KL: constant without a `target`, else steered so that KL approaches it (Ziegler et al. 2019,
    §2.2).

    coef ← coef · (1 + clip(KL / target − 1, ±0.2) · n / horizon), where KL is the mean over replies of the *sum* over
    a reply's tokens, and n counts replies. `coef` is the whole state.
    """

    coef: float
    target: float | None
    horizon: float

    def update(self, kl_per_reply: float, num_replies: int) -> None:
        """Raises NonFiniteError: no bound keeps the weight from becoming NaN with the KL."""
        if self.target is None:
            return
        if not math.isfinite(kl_per_reply):
            raise NonFiniteError(f"the KL to the reference is {kl_per_reply}")
        error = min(max(kl_per_reply / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_replies / self.horizon


class KLSettings(Protocol):
    """How the weight of the KL is controlled; `KLConfig` explains the fields."""

    controller: Literal["fixed", "adaptive"]
    coef: float
    target: float
    horizon: float


def make_kl_controller(config: KLSettings) -> KLController:
    return KLController(config.coef, config.target if config.controller == "adaptive" else None, config.horizon)


def kl_summary(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> dict[str, Any]:
    """Means over replies of the summed per-token estimates: {"k1": …, "k3": …}, in nats a reply."""
    replies = max(int(mask.any(-1).sum()), 1)
    return {
        name: float((kl_estimate(logprobs, ref_logprobs, name) * mask).sum() / replies)  # type: ignore[arg-type]
        for name in ("k1", "k3")
    }
