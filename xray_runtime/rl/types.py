"""Data of one iteration: frozen dataclasses whose fields are columns of B rows.

`xray_runtime.data.columns` documents every column: shape, dtype, writer, readers, meaning; here is what it leaves out.
`Rows`, a plain dictionary, is the form in which columns are sent to actors and back; `to_rows` and `read` convert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from xray_runtime.data.rows import Ragged, Rows, join_column, num_rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, eq=False)
class Text:
    """Prompts and replies together, in the policy's tokens."""

    input_ids: Ragged
    prompt_lengths: np.ndarray
    id: np.ndarray
    """Unique number of the row within an iteration."""


@dataclass(frozen=True, eq=False)
class EpisodeColumns:
    """Additional columns of replies that are episodes."""

    prompt_ids: Ragged
    response_mask: Ragged
    """True where the policy sampled the token; it read the others between its turns."""
    turn_rewards: Ragged
    turns: np.ndarray
    episode_reward: np.ndarray
    failure: np.ndarray
    info: np.ndarray
    """JSON: numbers that the environment reported with rewards, each summed over the turns."""
    answers: np.ndarray
    """JSON: the environment's answers to the reset and to each turn, or an agent's record."""
    branches: Ragged | None = None
    """Only for agents: `rl.agent_rows`."""
    ran_again: np.ndarray | None = None
    """Only for agents: how often infrastructure failed. Not in the ledger, whose bytes no failed process changes."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """Sampled replies; those to one prompt follow one another."""

    response_ids: Ragged
    rollout_logprobs: Ragged
    """By the generator, at the sampling temperature."""
    ended: np.ndarray
    seed: np.ndarray
    version: np.ndarray
    prompt: np.ndarray
    episodes: EpisodeColumns | None = None

    @classmethod
    def read(cls, rows: Rows) -> Rollout:
        """From the generator's answer with `seed`, `version` and `prompt` added, or from a file."""
        episodes = _fields_in(EpisodeColumns, rows)
        return cls(**_fields_in(cls, rows), episodes=EpisodeColumns(**episodes) if episodes else None)

    def own_tokens(self) -> Ragged:
        """The tokens that the policy sampled."""
        if self.episodes is None:
            return self.response_ids
        mask = self.episodes.response_mask
        return Ragged.of(row[chosen] for row, chosen in zip(self.response_ids, mask, strict=True))


@dataclass(frozen=True, eq=False)
class Scores:
    """Outputs of policy, reference and critic on the replies."""

    logprobs: Ragged
    """Empty in rows whose log-probabilities the update's first step computes."""
    ref_logprobs: Ragged
    values: Ragged | None = None
    """Absent without a critic; so is `final_values`."""
    final_values: np.ndarray | None = None

    @classmethod
    def read(cls, rows: Rows) -> Scores:
        return cls(**_fields_in(cls, rows))


@dataclass(frozen=True, eq=False)
class UpdateRows:
    """Input of the update: the replies that have a reward."""

    text: Text
    old_logprobs: Ragged
    """Empty in rows that the first step scores; so is `weights`."""
    advantages: Ragged
    weights: Ragged
    """Importance weight of the proximal policy relative to the sampling policy."""
    rollout_logprobs: Ragged
    values: Ragged | None = None
    """Absent without a critic; so is `returns`."""
    returns: Ragged | None = None
    ref_logprobs: Ragged | None = None
    """Only if the KL is in the loss."""
    response_mask: Ragged | None = None
    """Only for episodes."""
    branches: Ragged | None = None
    """Only for agents."""


@dataclass(frozen=True)
class Experience:
    """One rollout ready for updates."""

    rows: UpdateRows
    rollout: Rollout
    """The replies that have a reward; likewise `ref_logprobs`."""
    ref_logprobs: Ragged
    num_tokens: int
    """Number of tokens that the policy sampled."""
    reference_kl: float
    """Mean KL of a reply to the reference, by k1, in nats."""
    mismatch: float
    """Mean |log-probability difference| between generator and policy, in nats per token."""
    metrics: dict[str, float]

    @property
    def num_rows(self) -> int:
        return len(self.rows.text.id)


def to_rows(columns: DataclassInstance) -> Rows:
    """The columns as a dictionary, without those that are None."""
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


def rows_joined(parts: Sequence[T]) -> T:
    """The rows of several parts, concatenated."""
    ends = np.cumsum([0, *(num_rows(to_rows(part)) for part in parts)]).tolist()
    places = [range(start, end) for start, end in pairwise(ends)]
    return _each(lambda *columns: join_column(columns, places), *parts)


def _each(function: Callable[..., Any], *parts: T) -> T:
    """Apply `function` to each column of all parts; None stays None."""

    def of(values: list[Any]) -> Any:
        if values[0] is None:
            return None
        nested = is_dataclass(values[0]) and not isinstance(values[0], Ragged)
        return _each(function, *values) if nested else function(*values)

    return type(parts[0])(**{f.name: of([getattr(part, f.name) for part in parts]) for f in fields(parts[0])})


def _fields_in(kind: type[DataclassInstance], rows: Rows) -> dict[str, Any]:
    return {field.name: rows[field.name] for field in fields(kind) if field.name in rows}
