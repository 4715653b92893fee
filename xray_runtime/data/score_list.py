"""Checks of the scores that a user's function returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any

from xray_runtime.errors import shown


class FormError(ValueError):
    """A function's result is not a list of scores."""


def score_list(answer: Any, num_replies: int) -> list[Any]:
    """The scores in a result: a list, a tuple, another sequence, a generator, or a one-dimensional array.

    Raises:
        FormError: it has another type or number of entries, or an entry that cannot be a number.
    """
    if isinstance(answer, str | bytes | Mapping | Set) or not isinstance(answer, Iterable):
        raise FormError(f"must return a list of numbers, one per reply, not {shown(answer)}")
    dimensions = getattr(answer, "ndim", 1)
    if dimensions != 1:
        raise FormError(f"must return a list of numbers, one per reply, not an array of {dimensions} dimensions")
    # A generator may never end.
    scores = list(islice(answer, num_replies + 1))
    if len(scores) != num_replies:
        found = f"more than {num_replies}" if len(scores) > num_replies else len(scores)
        raise FormError(f"must return one number per reply; for {num_replies} replies it returned {found}")
    for score in scores:
        if isinstance(score, str | bytes) or (isinstance(score, Iterable) and getattr(score, "ndim", 1) != 0):
            raise FormError(f"must return a list of numbers; {shown(score)} is in it")
    return scores
