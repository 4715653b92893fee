"""What every source of reward that is no model is given, and what it answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from xray_runtime.data.pairs import Messages


@dataclass(frozen=True)
class Batch:
    """Replies to be scored. Every list has one entry a reply."""

    prompts: Sequence[str]
    replies: Sequence[str]
    messages: Sequence[Messages]
    """The prompts with their roles."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Column of the dataset → its values, None where a row has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`stage` and `step`."""

    def take(self, rows: Sequence[int]) -> Batch:
        """The replies at `rows`."""
        prompts, replies = ([of[i] for i in rows] for of in (self.prompts, self.replies))
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        return Batch(prompts, replies, [self.messages[i] for i in rows], columns, self.metadata)

    def column(self, name: str | None) -> Sequence[Any]:
        """The values of a column; None each where there is no name."""
        return [None] * len(self.replies) if name is None else self.columns[name]


@dataclass(frozen=True)
class Score:
    """What a source says of one reply."""

    value: float
    """NaN: it has failed to say."""
    why: str | None = None
    """Why it failed; or what a judge said."""


def failure(why: str) -> Score:
    """No score, and why: in one line, without addresses in memory, so that the same failure has the same text."""
    return Score(math.nan, re.sub(r"\b0x[0-9a-f]{6,}", "0x…", " ".join(why.split()))[:500])


def described(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def as_number(value: Any) -> float | None:
    """`value` where it is a finite number, numpy's and torch's included, else None."""
    if isinstance(value, str | bytes) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def is_infinite(value: Any) -> bool:
    """Whether `value` is a number, numpy's and torch's included, that is infinite."""
    try:
        return not isinstance(value, str | bytes) and math.isinf(float(value))
    except (TypeError, ValueError):
        return False
    except OverflowError:
        return True  # an integer beyond every float


class Source(Protocol):
    """A source of reward."""

    relative: bool
    """Whether its score of a reply may depend on the others."""

    def score(self, batch: Batch) -> list[Score]:
        """One score a reply. What fails is a failed score, after the retries that the config allows.

        Raises:
            ValueError: it cannot be asked this at all (a wrong form of a column, of an answer of a user's function).
            NonFiniteError: a user's function returned infinity, which is no failed score but a wrong one.
        """
