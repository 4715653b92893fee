"""Gold scores: the best available measure of a reply's quality. The reward model never sees them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xray_runtime.config.allowed_imports import check_import
from xray_runtime.config.sources import BUILT_IN_GOLD
from xray_runtime.data.score_list import score_list

GoldScore = Callable[[Sequence[str], Sequence[str]], list[float]]
"""(prompt texts, replies) → one score per reply; higher is better."""

USES: tuple[str, ...] = ()
"""Modules that are imported by name here. A key digests the code of user functions separately."""


def vader(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
    """VADER's compound sentiment of each reply, in [−1, 1] (Hutto & Gilbert 2014)."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(reply)["compound"] for reply in replies]


def load_gold(name: str, functions: Mapping[str, Callable[..., Any]]) -> GoldScore:
    """`vader` or a user's function, with checked results.

    Args:
        name: a name in `functions` (passed by a graph), or an import path `module:function`.

    Raises:
        ValueError: as `import_function`; later, if a call does not return one finite number per reply.
    """
    if name == BUILT_IN_GOLD:
        return vader
    function = functions.get(name) or import_function(name, "gold")

    def checked(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
        answer = function(list(prompts), list(replies))
        try:
            scores = [float(score) for score in score_list(answer, len(replies))]
        except (TypeError, ValueError) as error:
            raise ValueError(f"gold: {name!r} {error}") from error
        if not all(map(math.isfinite, scores)):
            raise ValueError(
                f"gold: {name!r} must return one finite number per reply; of {len(replies)} numbers "
                f"{sum(map(math.isfinite, scores))} are finite"
            )
        return scores

    return checked


def import_function(name: str, field: str) -> Callable[..., Any]:
    """The function `module:function`.

    Args:
        field: the config field, for errors.

    Raises:
        ValueError: XRAY_ALLOWED_IMPORTS does not name its module, or it cannot be imported or called.
    """
    function = _imported(name, field)
    if not callable(function):
        raise ValueError(f"{field}: {name!r} is {type(function).__name__}, not a function of (prompts, replies)")
    return function


def _imported(name: str, field: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"{field}: {name!r} is not allowed; it must be 'vader' or 'module:function'")
    # Check here too: the name may come from a stranger's checkpoint.
    try:
        check_import(name)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may fail in any way while it loads
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{field}: {name!r} cannot be imported ({reason})") from error
