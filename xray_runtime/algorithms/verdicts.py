"""Statistics of human verdicts on two replies, `a` and `b`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

SHARES = {"a": 1.0, "b": 0.0, "tie": 0.5, "bad": 0.5}
"""Verdict → score of `a`; a skip has none."""


def mean_share(shares: Collection[Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """The mean over prompts of their judges' mean score, and its 95% interval (Wilson 1927)."""
    # Imports torch, which commands that only read judgements do not need.
    from xray_runtime.algorithms.statistics import wilson_interval

    rate = sum(sum(values) / len(values) for values in shares) / len(shares)
    return rate, wilson_interval(rate, len(shares))


def outcomes(shares: Iterable[float]) -> dict[str, int]:
    """Number of prompts won, lost and tied: mean score above, below and exactly one half."""
    found = list(shares)
    won, lost = sum(share > 0.5 for share in found), sum(share < 0.5 for share in found)
    return {"won": won, "lost": lost, "tied": len(found) - won - lost}
