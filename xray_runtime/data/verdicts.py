"""What a person's verdict on two replies, `a` and `b`, counts for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

SHARES = {"a": 1.0, "b": 0.0, "tie": 0.5, "bad": 0.5}
"""Verdict → share of a win that it is for `a`; a skip is none."""


def mean_share(shares: Collection[Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """Mean over prompts of what their judges said in the mean, one or more each; its 95% interval (Wilson 1927)."""
    # torch, which commands that only read judgements need not wait for.
    from xray_runtime.algorithms.statistics import wilson_interval

    rate = sum(sum(values) / len(values) for values in shares) / len(shares)
    return rate, wilson_interval(rate, len(shares))
