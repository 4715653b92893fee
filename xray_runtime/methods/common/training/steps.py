"""The answer to an optimizer step: sums over the whole step, all micro-batches and ranks.

Each objective has one dataclass of sums, in units of one row or token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from xray_runtime.data.batch import StepAnswer

S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True)
class SFTSums:
    nll: float


@dataclass(frozen=True)
class PairSums:
    """Sums of a reward model."""

    loss: float
    correct: float
    """Number of pairs whose chosen side scores higher; ties count half."""


@dataclass(frozen=True)
class DPOSums:
    loss: float
    correct: float
    margin: float
    """Implicit reward of the chosen reply minus that of the rejected one."""
    chosen_logprobs: float
    rejected_logprobs: float


@dataclass(frozen=True)
class KTOSums:
    loss: float
    desirable_rewards: float
    undesirable_rewards: float


@dataclass(frozen=True)
class ValueSums:
    """Sums of a critic."""

    value_loss: float
    value_clip_count: float


@dataclass(frozen=True)
class PolicySums:
    """Sums of a policy that learns from rewards."""

    policy_loss: float
    entropy_sum: float
    clip_count: float
    dual_clip_count: float
    approx_kl_sum: float
    """KL to the policy before the update, by k3."""
    value_loss: float | None = None
    """Only with a value head; likewise `value_clip_count`."""
    value_clip_count: float | None = None


@dataclass(frozen=True)
class StepStatistics(Generic[S]):
    """A model's report on one optimizer step."""

    sums: S
    grad_norm: float
    refused_by: int | None = None
    """First rank whose loss is not finite; None if all are."""
    computed_tokens: float = 0.0
    """Tokens that went through the model's layers: a shared prompt counts once, padding too."""

    def non_finite(self) -> Iterator[tuple[str, float]]:
        """The sums that are NaN or infinite, by name."""
        for name, value in sorted(asdict(self.sums).items()):
            if value is not None and not math.isfinite(value):
                yield name, value


def read_step(kind: type[S], answer: StepAnswer) -> StepStatistics[S]:
    """The result of `WholeModel.train`; `kind` is the dataclass of the objective's sums."""
    sums = answer.sums
    refused = sums.get("refused_by")
    return StepStatistics(
        kind(**{field.name: sums[field.name] for field in fields(kind) if field.name in sums}),
        sums["grad_norm"],
        None if refused is None else int(refused),
        sums.get("computed_tokens", 0.0),
    )
