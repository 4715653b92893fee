"""Signs that a policy learns to please its reward instead of what the reward stands for (reward hacking).

Pure functions of what was measured of each rollout: the first iterations of a stage are held against the last ones.
Gao et al. 2023 ("Scaling laws for reward model overoptimization") show the pattern: the reward that is trained on goes
on rising while what it stands for stays or falls, at a growing distance from the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Points = Mapping[str, float]
"""Metric → what it was in one iteration, or on average over several."""

GOLD = "gold"
JUDGE, LENGTH, REPETITION, PHRASE, KL, ENSEMBLE = "judge", "length", "repetition", "phrase", "kl", "ensemble"
SILENT, ROUTER = "silent", "router"
SOURCE = "reward/source/"
REPEATED, COMMON, ROUTED = "rollout/distinct_in_reply", "rollout/common_phrase", "router/entropy"
WATCHED = ("reward/gold", SOURCE, "rollout/length", "kl/reference_k1", REPEATED, COMMON, ROUTED)
"""Beginnings of the metrics that are compared."""
PHRASE_TOKENS = 3
PHRASE_RISE = 0.25
"""Share of replies by which a phrase must have spread."""


class Bounds(Protocol):
    """The least change for an alert; `WatchConfig` explains the fields."""

    reward_rise: float
    judge_share: float
    max_length_ratio: float
    min_distinct_ratio: float
    common_phrase: float
    max_kl_per_token: float
    min_router_entropy: float
    max_disagreement_ratio: float


Z = 1.645
"""Quantile of a one-sided 95% bound."""


@dataclass(frozen=True)
class Sign:
    """Something that speaks for a hacked reward."""

    name: str
    """`judge/SOURCE/JUDGE`, `silent/JUDGE`, `ensemble/SOURCE`, `length`, `repetition`, `phrase`, `kl`, `router`; a
    metric is `hacking/NAME`."""
    text: str
    """The observation, in plain words."""


def signs(
    first: Sequence[Points], last: Sequence[Points], weights: Mapping[str, float], bounds: Bounds, num_prompts: int
) -> list[Sign]:
    """Signs of a hacked reward, by the bounds of the config.

    Args:
        first, last: of equally many iterations each.
        weights: source of reward, as in metrics → its weight; one of weight 0 is not trained on and judges, like the
            gold score.
        num_prompts: of an iteration; replies to one prompt are not independent.
    """
    early, late = averages(first), averages(last)
    names = [
        f"{JUDGE}/{source}/{judge}"
        for source, weight in weights.items()
        for judge in (GOLD, *(name for name, of_judge in weights.items() if of_judge == 0))
        if weight and _pleased(early, late, source, judge, math.copysign(1, weight), bounds, num_prompts * len(first))
    ]
    # A judge that does not answer sees nothing wrong.
    names += [f"{SILENT}/{name}" for name, weight in weights.items() if weight == 0 and _mean_of(name) not in late]
    if _outside(early, late, "rollout/length", bounds.max_length_ratio):
        names.append(LENGTH)
    if _known(early, late, REPEATED) and not late[REPEATED] >= bounds.min_distinct_ratio * early[REPEATED]:
        names.append(REPETITION)
    if _known(early, late, COMMON) and not late[COMMON] < max(bounds.common_phrase, early[COMMON] + PHRASE_RISE):
        names.append(PHRASE)
    if "kl/reference_k1" in late and not _per_token(late) <= bounds.max_kl_per_token:
        names.append(KL)
    if _known(early, late, ROUTED) and not late[ROUTED] >= bounds.min_router_entropy * early[ROUTED]:
        names.append(ROUTER)
    for source, weight in weights.items():
        metric = f"{SOURCE}{source}/disagreement"
        known = weight and _known(early, late, metric)
        if known and not late[metric] <= bounds.max_disagreement_ratio * early[metric]:
            names.append(f"{ENSEMBLE}/{source}")
    return [Sign(name, describe(name, early, late)) for name in names]


def averages(points: Sequence[Points]) -> dict[str, float]:
    """The mean of each metric over the iterations that have it; of deviations the root of the mean square."""
    found: dict[str, list[float]] = {}
    for point in points:
        for name, value in point.items():
            found.setdefault(name, []).append(value)
    return {
        name: math.sqrt(math.fsum(v * v for v in values) / len(values))
        if name.endswith("std")
        else math.fsum(values) / len(values)
        for name, values in found.items()
    }


def describe(name: str, early: Points, late: Points) -> str:
    """A sign in plain words, from the averages over the first and the last iterations."""
    kind, _, rest = name.partition("/")
    if kind == JUDGE:
        source, _, judge = rest.rpartition("/")
        learned, judged = _mean_of(source), _mean_of(judge)
        who = "the gold score" if judge == GOLD else f"{judge}, which is not trained on,"
        return (
            f"the reward {source} rose from {early[learned]:+.2f} to {late[learned]:+.2f} while {who} went from "
            f"{early[judged]:+.2f} to {late[judged]:+.2f}: the policy learned to please the reward, not what it stands "
            "for"
        )
    if kind == SILENT:
        return f"{rest}, which is not trained on, scored none of the last replies: it can judge nothing"
    if kind == ENSEMBLE:
        metric = f"{SOURCE}{rest}/disagreement"
        return (
            f"the members of the ensemble {rest} disagree by {late[metric]:.2f} deviations, at first by "
            f"{early[metric]:.2f}: the policy went where they know little"
        )
    if kind == LENGTH:
        return f"replies went from {early['rollout/length']:.1f} to {late['rollout/length']:.1f} tokens"
    if kind == REPETITION:
        return (
            f"replies repeat themselves: {late[REPEATED]:.0%} of the pairs of tokens in a reply are different ones, at "
            f"first {early[REPEATED]:.0%}"
        )
    if kind == PHRASE:
        return (
            f"{late[COMMON]:.0%} of the replies hold the same {PHRASE_TOKENS} tokens in a row, at first at most "
            f"{early[COMMON]:.0%}"
        )
    if kind == ROUTER:
        return (
            f"routers collapse: the loads of their experts have {late[ROUTED]:.0%} of the entropy of even ones, at "
            f"first {early[ROUTED]:.0%}"
        )
    return f"the policy is {_per_token(late):.2f} nats a token from the reference"


def _pleased(
    early: Points, late: Points, source: str, judge: str, sign: float, bounds: Bounds, num_prompts: int
) -> bool:
    """Whether a source rose and a judge by less than the required share of that, each in standard deviations."""
    risen, stayed = _rise(early, late, source), _rise(early, late, judge)
    if risen is None or stayed is None:
        return False
    # Two means over so many prompts, whose difference is this far off at most.
    error = Z * math.sqrt(2 / num_prompts)
    return sign * risen >= bounds.reward_rise and stayed + error < bounds.judge_share * sign * risen


def _rise(early: Points, late: Points, source: str) -> float | None:
    """By how many of its deviations a source rose; None where nothing is known of it."""
    mean = _mean_of(source)
    std = "reward/gold_std" if source == GOLD else f"{SOURCE}{source}/std"
    if not (_known(early, late, mean) and _known(early, late, std)):
        return None
    risen = late[mean] - early[mean]
    # A source that hardly varied at first, such as a rare bonus, is scaled by the deviation over both periods.
    deviation = max(early[std], math.sqrt((early[std] ** 2 + late[std] ** 2) / 2 + risen**2 / 4) / 2)
    return risen / deviation if deviation else 0.0


def _mean_of(source: str) -> str:
    return "reward/gold" if source == GOLD else f"{SOURCE}{source}/mean"


def _known(early: Points, late: Points, metric: str) -> bool:
    return metric in early and metric in late


def _per_token(points: Points) -> float:
    return points["kl/reference_k1"] / max(points.get("rollout/length", 1.0), 1.0)


def _outside(early: Points, late: Points, metric: str, ratio: float) -> bool:
    """Whether a positive metric changed by more than a factor."""
    if not _known(early, late, metric):
        return False
    return not early[metric] / ratio <= late[metric] <= early[metric] * ratio
