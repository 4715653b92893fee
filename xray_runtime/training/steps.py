"""Input and output of an optimizer step besides its rows: counts and sums over the whole step, all micro-batches and
ranks.

`WholeModel.train` takes and returns dictionaries: `StepTotals.to_wire` makes the first, `read_step` reads the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Divisors of the losses, and values shared by all rows; each objective uses some of them."""

    tokens: float | None = None
    """Number of response tokens."""
    rows: float | None = None
    pairs: float | None = None
    kl_coef: float | None = None
    """Weight of the KL in the loss."""
    baseline: float | None = None
    """KTO's z."""

    def to_wire(self) -> dict[str, float]:
        """The fields that are not None."""
        return {name: float(value) for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class StepStatistics:
    """A model's report on one optimizer step."""

    sums: Mapping[str, float]
    """The objective's sums, in units of one row or token: `data.columns.STATISTICS`."""
    grad_norm: float
    refused_by: int | None = None
    """First rank whose loss is not finite; None if all are."""
    computed_tokens: float = 0.0
    """Tokens that went through the model's layers: a shared prompt counts once, padding too."""

    def non_finite(self) -> Iterator[tuple[str, float]]:
        """The sums that are NaN or infinite, by name."""
        for name, value in sorted(self.sums.items()):
            if not math.isfinite(value):
                yield name, value


def read_step(answer: Mapping[str, float]) -> StepStatistics:
    """The result of `WholeModel.train`."""
    sums = dict(answer)
    grad_norm, refused = sums.pop("grad_norm"), sums.pop("refused_by", None)
    computed_tokens = sums.pop("computed_tokens", 0.0)
    return StepStatistics(sums, grad_norm, None if refused is None else int(refused), computed_tokens)
