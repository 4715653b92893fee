"""What goes into an optimizer step beside its rows, and what comes out: counts and sums, each a number of the whole
step, whichever micro-batches and ranks it is spread over.

`WholeModel.train` takes and gives them as dictionaries: `StepTotals.to_wire` makes the one, `read_step` reads the
other. An objective's sums are the fields of one dataclass here, in the units of one row or token each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What losses divide their sums by, and numbers that hold for all rows; an objective says which it needs."""

    tokens: float | None = None
    """Response tokens that count."""
    rows: float | None = None
    pairs: float | None = None
    kl_coef: float | None = None
    """Weight of a KL in the loss."""
    baseline: float | None = None
    """KTO's z."""

    def to_wire(self) -> dict[str, float]:
        """Those that are given."""
        return {name: float(value) for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class SFTSums:
    nll: float


@dataclass(frozen=True)
class PairSums:
    """Of a reward model."""

    loss: float
    correct: float
    """Pairs whose chosen side scores higher; ties count half."""


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
    """Of a critic."""

    value_loss: float
    value_clip_count: float


@dataclass(frozen=True)
class PolicySums:
    """Of a policy that learns from rewards."""

    policy_loss: float
    entropy_sum: float
    clip_count: float
    dual_clip_count: float
    approx_kl_sum: float
    """KL to the policy before the update, by k3."""
    value_loss: float | None = None
    """With a value head; so is `value_clip_count`."""
    value_clip_count: float | None = None


@dataclass(frozen=True)
class StepStatistics(Generic[S]):
    """What a model says of one optimizer step."""

    sums: S
    grad_norm: float
    refused_by: int | None = None
    """The first rank whose loss is not finite; None where all are."""

    def non_finite(self) -> Iterator[tuple[str, float]]:
        """The sums that are NaN or infinite, by name."""
        for name, value in sorted(asdict(self.sums).items()):
            if value is not None and not math.isfinite(value):
                yield name, value


def read_step(kind: type[S], answer: Mapping[str, float]) -> StepStatistics[S]:
    """From what `WholeModel.train` returned; `kind` names the sums of the model's objective."""
    refused = answer.get("refused_by")
    return StepStatistics(
        kind(**{field.name: answer[field.name] for field in fields(kind) if field.name in answer}),
        answer["grad_norm"],
        None if refused is None else int(refused),
    )
