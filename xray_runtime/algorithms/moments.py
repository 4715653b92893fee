"""Running mean and deviation over batches (Chan, Golub & LeVeque 1979)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xray_runtime.errors import NonFiniteError


@dataclass
class RunningMoments:
    """Mean and population deviation of everything seen; the three fields are the whole state."""

    count: int = 0
    mean: float = 0.0
    sum_squares: float = 0.0
    """Σ (x − mean)²."""

    def update(self, batch: Sequence[float]) -> None:
        """Take `batch` in. Raises NonFiniteError: one NaN would stay in the moments for good."""
        if not batch:
            return
        if not all(map(math.isfinite, batch)):
            raise NonFiniteError("a reward in the running moments is not finite")
        n = len(batch)
        batch_mean = math.fsum(batch) / n
        batch_squares = math.fsum((x - batch_mean) ** 2 for x in batch)
        delta = batch_mean - self.mean
        total = self.count + n
        self.sum_squares += batch_squares + delta * delta * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    @property
    def std(self) -> float:
        """Population deviation; 1 before there are two different values, so that dividing by it is safe."""
        variance = self.sum_squares / self.count if self.count else 0.0
        return math.sqrt(variance) or 1.0
