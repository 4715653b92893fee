"""Gold scores, the best available measure of a reply's quality, which the reward model never sees; and the form of the
scores that users' functions return."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import islice
from types import SimpleNamespace
from typing import Any

from xray_runtime.data.reasoning import answers_of
from xray_runtime.kernel.arguments import FIELDS, Arguments
from xray_runtime.kernel.config.allowed_imports import check_import
from xray_runtime.kernel.config.sources import BUILT_IN_GOLD
from xray_runtime.kernel.errors import shown

GoldScore = Callable[[Sequence[str], Sequence[str]], list[float]]
"""(prompt texts, replies) → one score per reply; higher is better."""

USES: tuple[str, ...] = ()
"""Modules that are imported by name here. A key digests the code of user functions separately."""


def vader(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
    """VADER's compound sentiment of each answer, in [−1, 1] (Hutto & Gilbert 2014)."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(answer)["compound"] for answer in answers_of(replies)]


def load_gold(name: str, functions: Mapping[str, Callable[..., Any]]) -> GoldScore:
    """`vader` or a user's function, with checked results.

    Args:
        name: a name in `functions` (passed by a graph), or an import path `module:function`.

    Raises:
        ValueError: as `import_function` and `Arguments`; later, if a call does not return one finite number per reply.
    """
    if name == BUILT_IN_GOLD:
        return vader
    function = functions.get(name) or import_function(name, "gold")
    arguments = Arguments(function, f"gold {name!r}", FIELDS)
    arguments.check(())

    def checked(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
        positional, keywords = arguments.of(SimpleNamespace(prompts=prompts, replies=replies))
        answer = function(*positional, **keywords)
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
    """The function `module:function`. Raises ValueError, with the config field, if XRAY_ALLOWED_IMPORTS does not name
    its module, or if it cannot be imported or called."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"{field}: {name!r} is not allowed; it must be 'vader' or 'module:function'")
    # Check here too: the name may come from a stranger's checkpoint.
    try:
        check_import(name)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    try:
        function: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may fail in any way while it loads
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{field}: {name!r} cannot be imported ({reason})") from error
    if not callable(function):
        raise ValueError(f"{field}: {name!r} is {type(function).__name__}, not a function of (prompts, replies)")
    checked: Callable[..., Any] = function
    return checked


class FormError(ValueError):
    """A function's result is not a list of scores."""


def score_list(answer: Any, num_replies: int) -> list[Any]:
    """The scores in a result: a list, a tuple, another sequence, a generator, or a one-dimensional array. Raises
    FormError if it has another type or number of entries, or an entry that cannot be a number."""
    if isinstance(answer, str | bytes | Mapping | Set) or not isinstance(answer, Iterable):
        raise FormError(f"must return a list of numbers, one per reply, not {shown(answer)}")
    dimensions = getattr(answer, "ndim", 1)
    if dimensions != 1:
        raise FormError(f"must return a list of numbers, one per reply, not an array of {dimensions} dimensions")
    # A generator may never end.
    scores = list(islice(answer, num_replies + 1))
    if len(scores) != num_replies:
        count = f"more than {num_replies}" if len(scores) > num_replies else len(scores)
        raise FormError(f"must return one number per reply; for {num_replies} replies it returned {count}")
    for score in scores:
        if isinstance(score, str | bytes) or (isinstance(score, Iterable) and getattr(score, "ndim", 1) != 0):
            raise FormError(f"must return a list of numbers; {shown(score)} is in it")
    return scores
