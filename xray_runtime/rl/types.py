"""What an iteration of the loop hands on: frozen dataclasses whose fields are columns of B rows.

`xray_runtime.data.columns` says of every column its shape, its dtype, who writes it and who reads it. `Rows`, a plain
dictionary, is only the form in which columns travel to an actor and back: `to_rows` makes it, `read` takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from xray_runtime.data.rows import Ragged, Rows, join_column

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, eq=False)
class Text:
    """Prompts and replies together, in the policy's tokens."""

    input_ids: Ragged
    prompt_lengths: np.ndarray
    id: np.ndarray
    """A row's own number within an iteration."""


@dataclass(frozen=True, eq=False)
class EpisodeColumns:
    """What replies have besides where they are the turns of a conversation with an environment."""

    prompt_ids: Ragged
    """What the environment began the episode with."""
    response_mask: Ragged
    """Which tokens after the prompt the policy chose; it read the others between its turns."""
    turn_rewards: Ragged
    """What each turn earned, on the turn's last token."""
    turns: np.ndarray
    episode_reward: np.ndarray
    """NaN: the episode failed."""
    failure: np.ndarray
    """Why it failed; empty where it did not."""
    info: np.ndarray
    """JSON: the numbers that the environment gave beside rewards, each summed over the turns."""
    answers: np.ndarray
    """JSON: what the environment answered to being reset and to each turn."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """Sampled replies; those to one prompt follow one another."""

    response_ids: Ragged
    rollout_logprobs: Ragged
    """By the generator, at the sampling temperature."""
    ended: np.ndarray
    """False: cut off."""
    seed: np.ndarray
    """What each reply is drawn with."""
    version: np.ndarray
    """Policy version, the number of updates before it, that sampled the reply."""
    prompt: np.ndarray
    """Which of the stage's prompts each reply is to."""
    episodes: EpisodeColumns | None = None

    @classmethod
    def read(cls, rows: Rows) -> Rollout:
        """From the generator's answer, completed with `seed`, `version` and `prompt`, or from a file."""
        episodes = _fields_in(EpisodeColumns, rows)
        return cls(**_fields_in(cls, rows), episodes=EpisodeColumns(**episodes) if episodes else None)

    def own_tokens(self) -> Ragged:
        """What the policy said: of an episode without what it read in between."""
        if self.episodes is None:
            return self.response_ids
        mask = self.episodes.response_mask
        return Ragged.of(row[chosen] for row, chosen in zip(self.response_ids, mask, strict=True))


@dataclass(frozen=True, eq=False)
class Scores:
    """What policy, reference and critic say of replies."""

    logprobs: Ragged
    ref_logprobs: Ragged
    values: Ragged | None = None
    """Absent without a critic; so is `final_values`."""
    final_values: np.ndarray | None = None
    """Value of the state after the last token."""

    @classmethod
    def read(cls, rows: Rows) -> Scores:
        return cls(**_fields_in(cls, rows))


@dataclass(frozen=True, eq=False)
class UpdateRows:
    """What policy and critic are trained on: the replies that have a reward."""

    text: Text
    old_logprobs: Ragged
    advantages: Ragged
    weights: Ragged
    """Of the proximal policy to the one that sampled."""
    values: Ragged | None = None
    """Absent without a critic; so is `returns`."""
    returns: Ragged | None = None
    ref_logprobs: Ragged | None = None
    """Where the KL is in the loss."""
    response_mask: Ragged | None = None
    """Of episodes."""


@dataclass(frozen=True)
class Experience:
    """One rollout ready for updates."""

    rows: UpdateRows
    num_tokens: int
    """Tokens that the policy chose."""
    reference_kl: float
    """Mean KL of a reply to the reference, by k1, in nats."""
    mismatch: float
    """Mean |log-probability difference| of generator and policy, nats a token."""
    metrics: dict[str, float]

    @property
    def num_rows(self) -> int:
        return len(self.rows.text.id)


def to_rows(columns: DataclassInstance) -> Rows:
    """The columns in the form that actors take; those that are None are absent."""
    rows: Rows = {}
    for field in fields(columns):
        value = getattr(columns, field.name)
        if is_dataclass(value) and not isinstance(value, Ragged | type):
            rows |= to_rows(value)
        elif value is not None:
            rows[field.name] = value
    return rows


def rows_at(columns: T, places: Sequence[int] | np.ndarray) -> T:
    """The rows at `places`, in that order."""
    index = np.asarray(places, dtype=np.int64)
    return _each(lambda column: column[index], columns)


def rows_replaced(columns: T, places: Sequence[int], by: T) -> T:
    """The same rows with those of `by` at `places`."""
    kept = np.setdiff1d(np.arange(_num_rows(columns)), places)

    def replaced(old: Any, new: Any) -> Any:
        return join_column([old[kept], new], [kept.tolist(), places])

    return _each(replaced, columns, by)


def rows_joined(parts: Sequence[T]) -> T:
    """The rows of several parts, one after the other."""
    ends = np.cumsum([0, *map(_num_rows, parts)]).tolist()
    places = [range(start, end) for start, end in pairwise(ends)]
    return _each(lambda *columns: join_column(columns, places), *parts)


def _each(function: Callable[..., Any], *parts: T) -> T:
    """`function` of each column of all parts; what is None stays None."""

    def of(values: list[Any]) -> Any:
        if values[0] is None:
            return None
        nested = is_dataclass(values[0]) and not isinstance(values[0], Ragged)
        return _each(function, *values) if nested else function(*values)

    return type(parts[0])(**{f.name: of([getattr(part, f.name) for part in parts]) for f in fields(parts[0])})


def _num_rows(columns: DataclassInstance) -> int:
    return len(next(iter(to_rows(columns).values())))


def _fields_in(kind: type[DataclassInstance], rows: Rows) -> dict[str, Any]:
    return {field.name: rows[field.name] for field in fields(kind) if field.name in rows}
