"""Gold scores: what replies are really worth, as far as an evaluation can know. Never shown to the reward model."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence

GoldScore = Callable[[Sequence[str], Sequence[str]], list[float]]
"""(prompt texts, replies) → one score a reply; higher is better."""


def vader(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
    """VADER's compound sentiment of each reply, in [−1, 1] (Hutto & Gilbert 2014)."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(reply)["compound"] for reply in replies]


def load_gold(name: str) -> GoldScore:
    """`vader`, or your own function by its import path `module:function`.

    Raises:
        ValueError: it cannot be imported, or, when called, does not return one finite number a reply.
    """
    if name == "vader":
        return vader
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"gold: {name!r} cannot be imported ({error})") from error

    def checked(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
        scores = [float(score) for score in function(list(prompts), list(replies))]
        if len(scores) != len(replies) or not all(map(math.isfinite, scores)):
            raise ValueError(f"gold: {name!r} must return one finite number a reply ({len(replies)} replies)")
        return scores

    return checked
