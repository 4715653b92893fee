"""The headline of a run: the results of its last evaluation as a few cards, for the report and the studio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Card(NamedTuple):
    """One result."""

    title: str
    value: str
    note: str
    verdict: str = ""
    """`good` or `bad` where the interval leaves no doubt."""


def cards(e: Mapping[str, Any]) -> list[Card]:
    """The cards of an evaluation (`evaluation.json`). Raises KeyError or TypeError if it lacks what it must have."""
    found = []
    if e["gold_after"] is not None:
        low, high = e["gold_delta_ci95"]
        found.append(
            Card(
                "gold score",
                f"{e['gold_before']:+.3f} → {e['gold_after']:+.3f}",
                f"difference {e['gold_delta']:+.3f}, 95% {low:+.3f} to {high:+.3f}",
                "good" if low > 0 else "bad" if high < 0 else "",
            )
        )
    if e["win_rate"] is not None:
        low, high = (100 * bound for bound in e["win_rate_ci95"])
        title = f"win rate over the baseline (by {e['judge']})"
        note = f"95% {low:.1f} to {high:.1f}%, {e['samples']} held-out prompts"
        verdict = "good" if low > 50 else "bad" if high < 50 else ""
        found.append(Card(title, f"{100 * e['win_rate']:.1f}%", note, verdict))
    if e["reward_after"] is not None:
        change = f"{e['reward_before']:+.2f} → {e['reward_after']:+.2f}"
        unit = "in standard deviations of the reward model"
        found.append(Card("reward (trained against, does not judge)", change, unit))
    if e["win_rate"] is None:
        why = "no judge: every source was trained against, or there is none"
        found.append(Card("win rate over the baseline", "–", why))
    lengths = f"length {e['length_before']:.1f} → {e['length_after']:.1f} tokens"
    variety = f"different word pairs {e['distinct_2_before']:.2f} → {e['distinct_2_after']:.2f}"
    found.append(Card("KL to the baseline", f"{e['kl']:.2f}", f"nats a reply · {lengths} · {variety}"))
    return found


def sparkline(values: Sequence[float], width: float, height: float) -> str:
    """`values` as the points of an SVG polyline of this size; empty with fewer than two finite ones."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if len(finite) < 2:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    step = width / (len(finite) - 1)
    return " ".join(f"{n * step:.1f},{height - 2 - (v - low) / span * (height - 4):.1f}" for n, v in enumerate(finite))
