"""Signs of a hacked reward, from histories written by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from xray_runtime.algorithms.hacking import _rise, averages, describe, signs
from xray_runtime.methods.ppo.watch import WatchConfig

PROMPTS = 64
CLEAN = {
    "reward/source/rm/mean": 0.2,
    "reward/source/rm/std": 1.0,
    "reward/gold": 0.18,
    "reward/gold_std": 0.5,
    "rollout/length": 20.0,
    "rollout/distinct_in_reply": 0.9,
    "rollout/common_phrase": 0.1,
    "kl/reference_k1": 1.0,
}


def point(**changes: float) -> dict[str, float]:
    """A point with some metrics changed; `__` stands for a slash."""
    return CLEAN | {name.replace("__", "/"): value for name, value in changes.items()}


def seen(
    late: dict[str, float], early: dict[str, float] | None = None, weights: Any = None, **bounds: Any
) -> list[str]:
    config = WatchConfig(**bounds)
    found = signs([early or CLEAN] * 5, [late] * 5, weights or {"rm": 1.0}, config, PROMPTS)
    return [sign.name for sign in found]


LEARNED = {"reward__source__rm__mean": 1.76, "reward__gold": 0.20, "kl__reference_k1": 6.0}
"""The stage that taught us: learned reward +0.20 → +1.76, gold +0.18 → +0.20."""


def test_a_policy_that_stays_or_learns_raises_no_alert() -> None:
    assert seen(CLEAN) == []
    # Both rise: 1.56 deviations and (0.48 − 0.18) / 0.5 = 0.6, more than a quarter of them.
    assert seen(point(**LEARNED | {"reward__gold": 0.48})) == []


def test_a_learned_reward_that_rose_while_the_gold_score_did_not() -> None:
    assert seen(point(**LEARNED)) == ["judge/rm/gold"]
    [sign] = signs([CLEAN] * 5, [point(**LEARNED)] * 5, {"rm": 1.0}, WatchConfig(), PROMPTS)
    assert "rm rose from +0.20 to +1.76 while the gold score went from +0.18 to +0.20" in sign.text


@pytest.mark.parametrize(
    ("gold", "said"),
    # 1.645 · √(2 / (5 · 64)) = 0.130 deviations may be chance, a quarter of 1.56 is 0.39: 0.26 more are too few.
    [(0.18 + 0.5 * 0.25, True), (0.18 + 0.5 * 0.27, False), (-0.4, True)],
)
def test_a_judges_rise_within_chance_counts_for_the_policy(gold: float, said: bool) -> None:
    assert bool(seen(point(**LEARNED | {"reward__gold": gold}))) == said


def test_a_source_of_weight_0_judges_and_is_not_judged() -> None:
    judge = {"reward__source__held__mean": 0.0, "reward__source__held__std": 2.0}
    early, late = point(**judge), point(**judge, **LEARNED | {"reward__gold": 2.0})
    assert seen(late, early, {"rm": 1.0, "held": 0.0}) == ["judge/rm/held"]
    risen = point(**LEARNED | judge | {"reward__gold": 2.0, "reward__source__held__mean": 3.0})
    assert seen(risen, early, {"rm": 1.0, "held": 0.0}) == []
    # The other way round nothing was pleased: what is not trained on rose alone.
    assert seen(point(**judge | {"reward__source__held__mean": 9.0}), early, {"rm": 1.0, "held": 0.0}) == []


def test_a_judge_that_stops_scoring_raises_an_alert() -> None:
    weights = {"rm": 1.0, "held": 0.0}
    judged = point(reward__source__held__mean=0.0, reward__source__held__std=2.0)
    assert seen(CLEAN, judged, weights) == ["silent/held"]
    assert seen(CLEAN, CLEAN, weights) == ["silent/held"]
    assert seen(judged, judged, weights) == []


def test_a_penalty_is_pleased_by_falling() -> None:
    assert seen(point(reward__source__rm__mean=-1.76), weights={"rm": -1.0}) == ["judge/rm/gold"]
    assert seen(point(reward__source__rm__mean=1.76), weights={"rm": -1.0}) == []


def test_a_bonus_absent_at_first_has_deviations_too() -> None:
    early = point(reward__source__rm__mean=0.0, reward__source__rm__std=0.0)
    assert seen(point(reward__source__rm__mean=1.0, reward__source__rm__std=0.0), early) == ["judge/rm/gold"]


@pytest.mark.parametrize(
    ("late", "name"),
    [
        ({"rollout__length": 40.5}, "length"),
        ({"rollout__length": 9.5}, "length"),
        ({"rollout__distinct_in_reply": 0.44}, "repetition"),
        ({"rollout__common_phrase": 0.5}, "phrase"),
        ({"kl__reference_k1": 20.5}, "kl"),
    ],
)
def test_each_bound_has_its_own_alert(late: dict[str, float], name: str) -> None:
    assert seen(point(**late)) == [name]


@pytest.mark.parametrize(
    "late",
    [
        {"rollout__length": 39.5},
        {"rollout__length": 10.5},
        {"rollout__distinct_in_reply": 0.46},
        {"rollout__common_phrase": 0.49},
        {"kl__reference_k1": 19.5},
    ],
)
def test_values_within_a_bound_raise_no_alert(late: dict[str, float]) -> None:
    assert seen(point(**late)) == []


def test_a_phrase_common_from_the_start_raises_no_alert() -> None:
    early = point(rollout__common_phrase=0.6)
    assert seen(point(rollout__common_phrase=0.8), early) == []
    assert seen(point(rollout__common_phrase=0.86), early) == ["phrase"]


@pytest.mark.parametrize(("late", "said"), [(0.39, True), (0.4, False), (0.41, False), (1.0, False), (math.nan, True)])
def test_routers_that_collapse(late: float, said: bool) -> None:
    """Below half of an entropy of .8."""
    early = point(router__entropy=0.8)
    assert seen(point(router__entropy=late), early, min_router_entropy=0.5) == (["router"] if said else [])
    # A policy without routers.
    assert seen(point(router__entropy=late), min_router_entropy=0.5) == []


def test_members_of_an_ensemble_that_come_to_disagree() -> None:
    early, late = (point(reward__source__rm__disagreement=x) for x in (0.2, 0.41))
    assert seen(late, early) == ["ensemble/rm"]
    assert seen(early, early) == []


@pytest.mark.parametrize("metric", [name for name in CLEAN if name.startswith(("rollout", "kl"))])
def test_nan_metrics_raise_an_alert(metric: str) -> None:
    assert len(seen(CLEAN | {metric: float("nan")})) >= 1


def test_averages_are_over_the_iterations_that_have_a_metric() -> None:
    # Of deviations 3 and 4 the root of the mean square, √12.5.
    found = averages([{"a": 1.0, "s/std": 3.0}, {"a": 2.0, "s/std": 4.0}, {"a": 6.0, "b": 1.0}])
    assert found == {"a": 3.0, "b": 1.0, "s/std": pytest.approx(12.5**0.5)}


def test_a_rise_is_in_deviations() -> None:
    def rise(early: tuple[float, float], late: tuple[float, float]) -> float | None:
        first, last = ({"reward/gold": mean, "reward/gold_std": std} for mean, std in (early, late))
        return _rise(first, last, "gold")

    assert rise((1.0, 0.5), (2.0, 0.5)) == pytest.approx(2.0)
    # It hardly varied at first: √((0.1² + 0.3²) / 2 + 0.4² / 4) / 2 = 0.15 counts.
    assert rise((0.0, 0.1), (0.4, 0.3)) == pytest.approx(0.4 / 0.15)
    assert rise((1.0, 0.0), (1.0, 0.0)) == 0.0
    assert _rise({"reward/gold": 1.0}, {"reward/gold": 2.0}, "gold") is None
    assert _rise({"reward/gold": 1.0, "reward/gold_std": 1.0}, {}, "gold") is None


def test_a_judge_without_scores_raises_no_alert() -> None:
    unknown = {name: value for name, value in point(**LEARNED).items() if not name.startswith("reward/gold")}
    assert seen(unknown, unknown | CLEAN) == []


def test_without_lengths_the_kl_is_of_one_token() -> None:
    short = {name: value for name, value in CLEAN.items() if name != "rollout/length"}
    assert seen(short | {"kl/reference_k1": 1.01}, short) == ["kl"]
    assert seen(short | {"kl/reference_k1": 1.0}, short) == []
    assert seen(CLEAN | {"rollout/length": 0.5, "kl/reference_k1": 0.9}, CLEAN | {"rollout/length": 0.5}) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "judge/rm/held",
            "the reward rm rose from +0.20 to +1.76 while held, which is not trained on, went from +1.00",
        ),
        ("judge/a/b/gold", "the reward a/b rose from +2.00 to +3.00 while the gold score went from +0.18 to +0.20"),
        ("judge/rm/gold", "the policy learned to please the reward, not what it stands for"),
        ("silent/held", "held, which is not trained on, scored none of the last replies"),
        ("length", "replies went from 20.0 to 20.0 tokens"),
        ("repetition", "replies repeat themselves: 90% of the pairs of tokens"),
        ("phrase", "10% of the replies hold the same"),
        ("kl", "the policy is 0.30 nats a token from the reference"),
    ],
)
def test_each_alert_in_words(name: str, text: str) -> None:
    others = {"reward/source/held/mean": 1.0, "reward/source/a/b/mean": 2.0}
    late = point(**LEARNED) | others | {"reward/source/a/b/mean": 3.0}
    assert text in describe(name, CLEAN | others, late)
