"""The interface of sources of reward other than models."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from xray_runtime.data.reasoning import answers_of, reasoning_of

if TYPE_CHECKING:
    from pathlib import Path

    from xray_runtime.data.pairs import Messages

METRIC_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
"""A name from outside that a metric can have: without what MLflow refuses, or would take for a part of a path."""
MAX_NAMES = 100
"""Names in one result, and in the metrics of a rollout."""
LARGEST = 1e30
"""Sums of such numbers are finite, also as float32."""


@dataclass(frozen=True)
class Batch:
    """Replies to score. Every list has one entry for each reply."""

    prompts: Sequence[str]
    replies: Sequence[str]
    """Whole replies, with their reasoning (`data.reasoning`)."""
    messages: Sequence[Messages]
    """The prompts with their roles."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Column of the dataset → its values; None for rows without one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`stage` and `step`."""

    @property
    def reasoning(self) -> list[str | None]:
        """The reasoning of each reply; None: it has none."""
        return reasoning_of(self.replies)

    @property
    def answers(self) -> list[str]:
        """Each reply without its reasoning."""
        return answers_of(self.replies)

    def take(self, rows: Sequence[int]) -> Batch:
        """The replies at `rows`."""
        prompts, replies = ([of[i] for i in rows] for of in (self.prompts, self.replies))
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        return Batch(prompts, replies, [self.messages[i] for i in rows], columns, self.metadata)

    def column(self, name: str | None) -> Sequence[Any]:
        """The values of a column; all None if `name` is None."""
        return [None] * len(self.replies) if name is None else self.columns[name]


@dataclass(frozen=True)
class Score:
    """A source's score of one reply."""

    value: float
    """NaN: the source failed."""
    why: str | None = None
    """Why it failed, or a judge's answer."""
    is_due: bool = True
    """False: there is nothing to score, so a missing score is no failure."""


def failure(why: str) -> Score:
    """A failed score with its reason in one line, without memory addresses, so that equal failures have equal texts."""
    return Score(math.nan, re.sub(r"\b0x[0-9a-f]{6,}", "0x…", " ".join(why.split()))[:500])


def described(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def as_number(value: Any) -> float | None:
    """`value` as a float if it is a finite number, also of numpy or torch, else None."""
    if isinstance(value, str | bytes) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_bounded(value: Any) -> float | None:
    """`as_number`, if its size is at most `LARGEST`; True and False are none."""
    number = None if isinstance(value, bool) else as_number(value)
    return number if number is not None and abs(number) <= LARGEST else None


def must_be_bounded(value: Any) -> str:
    """The rule for values that `as_bounded` checks."""
    is_large = not isinstance(value, bool) and as_number(value) is not None
    return f"must be a finite number{f' of at most {LARGEST:g}' if is_large else ''}"


def is_infinite(value: Any) -> bool:
    """Whether `value` is an infinite number, also of numpy or torch."""
    try:
        return not isinstance(value, str | bytes) and math.isinf(float(value))
    except (TypeError, ValueError):
        return False
    except OverflowError:
        return True  # an integer that is too large for a float


class Source(Protocol):
    """An open source of reward. Implementations inherit what they do not change."""

    relative: bool = False
    """Whether the score of a reply may depend on the other replies."""
    runs_code: bool = False
    """Whether it runs code of replies, which its sandbox may refuse."""

    def check(self, dataset: Path, columns: Collection[str]) -> None:
        """Check what it takes from the dataset, in all rows, before any reply is scored.

        Args:
            columns: the dataset's columns.

        Raises:
            ValueError: a column, or a value of one, cannot be used.
        """
        return

    def score(self, batch: Batch) -> list[Score]:
        """One score for each reply; failures, after the configured retries, are failed scores.

        Raises:
            ValueError: a column, or the answer of a user's function, has a wrong form.
            NonFiniteError: a user's function returned infinity.
        """
        ...
