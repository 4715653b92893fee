"""One conversation of the policy with an environment, and a rollout of several.

A row is the prompt and, after it,

    turn   observation  turn   observation  turn
    1 1 1  0 0 0 0      1 1    0 0 0        1 1 1     response_mask
        r1                 r2                   r3    turn_rewards
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.batch import Rollout
from xray_runtime.data.pairs import Messages, prompt_text
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.rewards.source import MAX_NAMES, METRIC_NAME, as_bounded

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage

FAILURE_CHARS = 500

Prompt = tuple[Messages, list[int]]
"""Messages and tokens of one prompt."""


@dataclass(frozen=True)
class EpisodeBatch:
    """Prompts, each the start of one episode; purpose, number and row seed it."""

    prompts: Sequence[Prompt]
    columns: Mapping[str, Sequence[Any]]
    """Columns of the dataset, one value per prompt."""
    version: int | None
    """The policy's version; None: the one that is current at each call."""
    purpose: str
    number: int = 0
    group_size: int = 1
    """Number of consecutive copies of one prompt; their episodes share the environment's seed."""
    first_row: int = 0
    """Row number of the first prompt among all that are sampled for this purpose."""
    side: str = ""
    """Which of two models is compared: both may have the same version."""
    keep: bool = False
    """Agents' records go into the checkpoint (`EPISODES`): no ledger has them."""

    @property
    def name(self) -> str:
        return rollout_name(self.purpose, self.number, self.version) + (f"-{self.side}" if self.side else "")

    def starts(self, stage: Stage[Any, Any]) -> Iterator[tuple[int, dict[str, Any], int, list[int]]]:
        """(row, task, the environment's seed, tokens of the prompt) of each episode."""
        for number, (messages, ids) in enumerate(self.prompts):
            row = self.first_row + number
            task = {name: values[number] for name, values in self.columns.items()}
            task |= {"prompt": prompt_text(messages), "messages": messages}
            group = self.number, row // self.group_size
            yield row, task, derive_seed(stage.seed, stage.name, self.purpose, "environment", *group), list(ids)


@dataclass
class Episode:
    """A row: what one seat of a game read and said, or all of an episode without seats."""

    row: int
    """Number of its game."""
    seed: int
    prompt: list[int]
    seat: str = ""
    turns: int = 0
    """Number of its own turns."""
    ids: list[int] = field(default_factory=list)
    """Tokens after the prompt. These and the next three are of one length."""
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment reported with the rewards, each summed over the turns."""
    ended: bool = False
    """The environment ended it."""
    failure: str = ""
    """Why it has no reward."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Those of its game."""

    def say(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append a turn of the policy."""
        self.turns += 1
        self._add(ids, logprobs, True)

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy reads and did not sample."""
        self._add(ids, [0.0] * len(ids), False)

    def _add(self, ids: Sequence[int], logprobs: Sequence[float], sampled: bool) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.sampled += [sampled] * len(ids)
        self.rewards += [0.0] * len(ids)

    def reward_turn(self, reward: float) -> None:
        """Put a reward on the last token of the last turn."""
        self.rewards[max(index for index, sampled in enumerate(self.sampled) if sampled)] += reward

    def inform(self, info: Mapping[str, Any]) -> None:
        """Add the numbers in a turn's `info`, True as 1. Names that no metric can have are left out."""
        for name, value in info.items():
            number = as_bounded(int(value)) if isinstance(value, bool) else as_bounded(value)
            is_allowed = isinstance(value, bool | int | float) and METRIC_NAME.fullmatch(name)
            if is_allowed and number is not None and (name in self.info or len(self.info) < MAX_NAMES):
                self.info[name] = self.info.get(name, 0.0) + number


@dataclass
class Game:
    """One episode as its environment sees it."""

    number: int
    """In the pool."""
    row: int
    """Number among the rollout's games."""
    task: dict[str, Any]
    seed: int
    """The environment's seed, shared by all episodes of a group, because their rewards are compared."""
    rows: dict[str, Episode]
    """Seat → its row; without seats one, named ""."""
    seat: str
    """The seat whose turn it is."""
    replies: list[str] = field(default_factory=list)
    """The turns of all seats so far, as text."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """The environment's answers to the reset and to each turn: {"answer": …} or {"failure": reason}; where there are
    seats, with the `seat` and the `reply`."""
    over: bool = False
    """Ended, cut, or failed."""
    known: int = 0
    """Number of answers, including the reset's, that its environment in the pool has produced."""

    @staticmethod
    def of(
        row: int, task: dict[str, Any], seed: int, prompt: list[int], seats: Sequence[str], number: int | None = None
    ) -> Game:
        """A game at its start; `number` is `row` unless it is given."""
        names = seats or ("",)
        game = Game(
            row if number is None else number,
            row,
            task,
            seed,
            {name: Episode(row, seed, list(prompt), name) for name in names},
            names[0],
        )
        for episode in game.rows.values():
            episode.answers = game.answers
        return game

    @property
    def turn(self) -> Episode:
        """The row of the seat whose turn it is."""
        return self.rows[self.seat]

    def end(self) -> None:
        """The environment ended it."""
        for episode in self.rows.values():
            episode.ended = True

    def cut(self) -> None:
        """The last turn was cut off, which is no fault of the other seats."""
        self.end()
        self.turn.ended, self.over = False, True

    def fail(self, why: str) -> None:
        self.over = True
        for episode in self.rows.values():
            episode.failure = shortened(why)


def games_of_rows(count: int, group_size: int, rows_an_episode: int) -> list[int]:
    """The game of each row of `count` games: groups of `group_size` games to one prompt, in each the rows of one seat
    after those of another, so that replies that are compared follow one another."""
    starts = range(0, count, group_size)
    return [start + place for start in starts for _ in range(rows_an_episode) for place in range(group_size)]


def shortened(failure: str) -> str:
    """The reason of a failure in one line."""
    return " ".join(failure.split())[:FAILURE_CHARS]


def no_turn(seat: str) -> str:
    """Why the row of a seat that had no turn in its game has no reward."""
    return f"seat {seat!r} had no turn"


def rollout_of(episodes: Sequence[Episode], version: int) -> Rollout:
    """Episodes as the rows of a rollout; each row has the number of its game."""
    rewards = [np.nan if e.failure else float(np.sum(e.rewards)) for e in episodes]
    seats = [e.seat for e in episodes]
    rollout = Rollout(
        response_ids=Ragged.of(e.ids for e in episodes),
        rollout_logprobs=Ragged.of((e.logprobs for e in episodes), np.float32),
        ended=np.array([e.ended for e in episodes]),
        seed=np.array([e.seed for e in episodes]),
        version=np.full(len(episodes), version),
        prompt=np.array([e.row for e in episodes]),
        prompt_ids=Ragged.of(e.prompt for e in episodes),
        response_mask=Ragged.of((e.sampled for e in episodes), np.bool_),
        turn_rewards=Ragged.of((e.rewards for e in episodes), np.float32),
        turns=np.array([e.turns for e in episodes], np.int32),
        episode_reward=np.array(rewards, np.float64),
        failure=np.array([e.failure for e in episodes], object),
        info=np.array([json.dumps(e.info, sort_keys=True) for e in episodes], object),
        # Not sorted: a chat template writes tools and messages in their own order.
        answers=np.array([json.dumps(e.answers) for e in episodes], object),
    )
    return rollout.with_columns(seat=np.array(seats, object)) if any(seats) else rollout


def purpose_of(round: int) -> str:
    """The purpose that seeds a rollout: round 0 is an iteration's first, round r the r-th of replacement prompts."""
    return f"resample-{round - 1}" if round else "sample"


def rollout_name(purpose: str, number: int, version: int | None) -> str:
    """Name of one call of `sample`. Versions are answered separately, even if their replies are the same."""
    return "-".join(str(part) for part in (purpose, number, version) if part is not None)


def episode_means(episodes: Rollout) -> dict[str, float]:
    """Means over the episodes that did not fail: `turns`, and `info/NAME` for each number that environments reported
    with rewards, summed over an episode (0 if an episode lacks it); of more than `MAX_NAMES`, the most frequent."""
    valid = episodes.failure == ""
    infos = [json.loads(text) for text in episodes.info[valid].tolist()]
    counts = Counter(name for info in infos for name in sorted(info))
    names = sorted(sorted(counts, key=lambda name: (-counts[name], name))[:MAX_NAMES])
    means = {f"info/{name}": float(np.mean([info.get(name, 0.0) for info in infos])) for name in names}
    return {"turns": float(episodes.turns[valid].mean()), **means} if infos else {}
