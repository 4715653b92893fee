"""Texts about the time that stages and runs took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def computed_text(stage: Mapping[str, Any]) -> str:
    """The seconds of an entry of lifecycle.json, and the day if another run computed it."""
    seconds = f"{stage['computed_seconds']:.1f} s"
    if not stage["cached"]:
        return seconds
    day = f" on {stage['computed_at'][:10]}" if stage["computed_at"] else ""
    return f"cached; computed in {seconds}{day}"


def run_text(run: Mapping[str, Any]) -> str:
    """How a run ended and its seconds, with those of the cached stages when they were computed."""
    cached = [stage for stage in run["stages"] if stage["cached"]]
    text = f"{run['status']} in {run['seconds']:.0f} s"
    if cached:
        before = sum(stage["computed_seconds"] for stage in cached)
        text += f", {len(cached)} of {len(run['stages'])} stages cached, which took {before:.0f} s to compute"
    return text
