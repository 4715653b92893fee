"""Intervals of a mean that hold at every look, so that results may be read as often as people like.

The empirical-Bernstein confidence sequence with predictable plug-in weights: Waudby-Smith and Ramdas 2024, "Estimating
means of bounded random variables by betting", theorem 2 (c = 1/2). Observations are in [0, 1]; each has the same mean
given those before it. With probability 1 − α the mean is inside all intervals at once, from the first look to the last.
"""

from __future__ import annotations

import math

MAX_WEIGHT = 0.5


class ConfidenceSequence:
    """The interval after each observation, and inside all intervals before it; the mean is ever outside with a
    probability of at most `alpha`."""

    def __init__(self, alpha: float) -> None:
        self.count, self.low, self.high = 0, 0.0, 1.0
        self._log = math.log(2 / alpha)
        self._sum = self._weights = self._weighted = self._slack = 0.0
        self._squares = 0.25

    @property
    def mean(self) -> float | None:
        """The mean of all observations; None before the first."""
        return self._sum / self.count if self.count else None

    def add(self, x: float) -> None:
        """Take one observation. Raises ValueError if it is not from 0 to 1."""
        if not 0.0 <= x <= 1.0:
            raise ValueError(f"x = {x} is not allowed: must be from 0 to 1")
        # λ, and the mean in v, use the observations before this one only.
        t = self.count + 1
        weight = min(math.sqrt(2 * self._log / (self._squares / t * t * math.log1p(t))), MAX_WEIGHT)
        before = (0.5 + self._sum) / t
        self._weights += weight
        self._weighted += weight * x
        self._slack += (x - before) ** 2 * (-math.log1p(-weight) - weight)
        self.count, self._sum = t, self._sum + x
        self._squares += (x - (0.5 + self._sum) / (t + 1)) ** 2
        centre, half = self._weighted / self._weights, (self._log + self._slack) / self._weights
        self.low, self.high = max(self.low, centre - half), min(self.high, centre + half)
