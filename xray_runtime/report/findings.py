"""What the curves of a stage say in plain words, where it cannot have learnt what it was run for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Metric → its (step, value) points."""

SAME = 1e-9
"""Rewards that deviate by less are the same."""
STILL = 1e-3
"""Nats a token, summed over iterations: a policy that learns a task comes to a hundred times as much."""
MOST = 0.9


def policy_findings(series: Series) -> list[str]:
    """Of a stage of policy gradients: rewards that teach nothing, a policy that stays where it was."""
    found = []
    deviations, tied = _values(series, "reward/std"), _values(series, "rollout/tied_groups")
    if deviations and max(deviations) <= SAME:
        found.append("every reply had the same reward: there was nothing to learn from")
    elif tied and min(tied) >= 1.0:
        found.append("all replies to each prompt had the same reward: no group taught anything")
    elif tied and _mean(tied) >= MOST:
        found.append(f"all replies had the same reward for {_mean(tied):.0%} of the prompts, which taught nothing")
    moved = _values(series, "policy/approx_kl")
    if moved and sum(moved) < STILL:
        found.append(
            f"the policy hardly moved: {sum(moved):.1g} nats a token over all updates; a larger lr or more iterations "
            "would move it"
        )
    cut = _values(series, "rollout/truncated")
    if cut and min(cut) >= MOST:
        found.append(f"{_mean(cut):.0%} of the replies were cut off at max_new_tokens: few come to an end")
    return found


def _values(series: Series, name: str) -> list[float]:
    return [value for _, value in series.get(name, ())]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
