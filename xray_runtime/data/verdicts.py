"""What a person's verdict on two replies, `a` and `b`, counts for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

SHARES = {"a": 1.0, "b": 0.0, "tie": 0.5, "bad": 0.5}
"""Verdict → share of a win that it is for `a`; a skip is none."""


def mean_share(shares: Collection[Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """Mean over prompts of what their judges said in the mean, one or more each; its 95% interval (Wilson 1927)."""
    # torch, which commands that only read judgements need not wait for.
    from xray_runtime.algorithms.statistics import wilson_interval

    rate = sum(sum(values) / len(values) for values in shares) / len(shares)
    return rate, wilson_interval(rate, len(shares))


def outcomes(shares: Iterable[float]) -> dict[str, int]:
    """How many prompts were won, lost and tied: more, less and just one half."""
    found = list(shares)
    won, lost = sum(share > 0.5 for share in found), sum(share < 0.5 for share in found)
    return {"won": won, "lost": lost, "tied": len(found) - won - lost}
