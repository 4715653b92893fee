"""Pure tensor code of X-ray's algorithms, for losses, advantages and loops of your own. Imports torch."""

from __future__ import annotations

from xray_runtime.algorithms.advantages import gae, place_rewards, whiten
from xray_runtime.algorithms.checking import check_advantages, check_loss
from xray_runtime.algorithms.estimators import ESTIMATORS, AdvantageInputs, estimate
from xray_runtime.algorithms.groups import group_advantages, tied_groups
from xray_runtime.algorithms.kl import kl_estimate
from xray_runtime.algorithms.logprobs import logprobs_and_entropy
from xray_runtime.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    TokenLoss,
    kl_loss,
    policy_loss,
    reply_means,
    value_loss,
)

__all__ = [
    "ESTIMATORS",
    "POLICY_LOSSES",
    "AdvantageInputs",
    "PolicyLossInputs",
    "TokenLoss",
    "check_advantages",
    "check_loss",
    "estimate",
    "gae",
    "group_advantages",
    "kl_estimate",
    "kl_loss",
    "logprobs_and_entropy",
    "place_rewards",
    "policy_loss",
    "reply_means",
    "tied_groups",
    "value_loss",
    "whiten",
]
