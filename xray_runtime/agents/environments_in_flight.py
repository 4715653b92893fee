"""Episodes of an environment that are played while the weights change: each by itself, in a thread.

Its turns are journaled at its end, with the versions that sampled them; the environment's answers are, as ever, before
their use. An episode that had ended is played again from both, without generator and environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xray_runtime.agents.environment_episodes import Episodes
from xray_runtime.methods.common.sampling.episode import Episode, Game, rollout_name, rollout_of
from xray_runtime.methods.common.sampling.journaled_turns import JournaledTurns, Place, turns_line, version_columns
from xray_runtime.methods.common.sampling.reply_stream import ReplyStream, Sampled, by_token

if TYPE_CHECKING:
    from xray_runtime.agents.environments.pool import EnvironmentPool
    from xray_runtime.data.batch import Rollout
    from xray_runtime.methods.common.sampling.episode import EpisodeBatch
    from xray_runtime.methods.common.sampling.episode_source import SamplerSetup

MAX_THREADS = 1024
FIRST_NUMBER = 2**24
"""In the environment's pool; those of a validation, which is played at the same time, begin with 0."""


@dataclass(frozen=True)
class PlannedEpisode:
    place: Place
    purpose: str
    task: dict[str, Any]
    seed: int
    prompt: list[int]


@dataclass(frozen=True)
class PlayedEpisode:
    episode: Episode
    turns: list[Sampled]

    def version(self, default: int) -> int:
        return min((turn.version() for turn in self.turns), default=default)


class _GivenUpError(RuntimeError):
    """The episode was dropped."""


class _StaleError(RuntimeError):
    """A token is of too old a version."""


class EnvironmentsInFlight(Episodes):
    """The episodes of one stage with `in_flight_updates`."""

    def __init__(self, setup: SamplerSetup, pool: EnvironmentPool) -> None:
        super().__init__(setup, pool)
        config = setup.stage.config
        self._turns = JournaledTurns(setup.stage, self.journal)
        self._stream = ReplyStream(self._generate)
        under_way = (config.lag + 2) * config.rollout_size
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, under_way))
        self._size, self._oldest, self._num_stale = config.samples_per_prompt, 0, 0
        self._attempts: dict[Place, int] = {}
        self._dropped: set[Place] = set()

    def planned(self, batch: EpisodeBatch) -> list[PlannedEpisode]:
        starts = batch.starts(self._stage)
        return [PlannedEpisode((batch.number, row), batch.purpose, task, seed, ids) for row, task, seed, ids in starts]

    def start(self, planned: PlannedEpisode, step: int, stale: PlayedEpisode | None = None) -> Future[PlayedEpisode]:
        found = None if stale is not None else self._turns.find(planned.place)
        attempt = found[0] if found is not None else self._attempts.get(planned.place, -1) + 1
        self._attempts[planned.place] = attempt
        return self._threads.submit(self._play_alone, planned, step, attempt, found and found[1])

    def drop(self, planned: PlannedEpisode, reply: Future[PlayedEpisode]) -> None:
        reply.cancel()
        self._dropped.add(planned.place)

    def rollout(self, planned: Sequence[PlannedEpisode], played: Sequence[PlayedEpisode], version: int) -> Rollout:
        episodes, columns = [each.episode for each in played], []
        for each in played:
            versions = iter([v for turn in each.turns for v in by_token(turn.versions)])
            first = each.version(version)
            columns.append([next(versions, first) if own else first for own in each.episode.sampled])
        return rollout_of(episodes, version).with_columns(**version_columns(columns))

    @contextmanager
    def updating(self, version: int, oldest: int) -> Iterator[None]:
        with self._stream.updating(version, oldest):
            yield
            self._oldest = oldest

    def take_stale(self) -> int:
        found, self._num_stale = self._num_stale, 0
        return found + self._stream.take_stale()

    def metrics(self, episodes: Rollout) -> dict[str, float]:
        return {"speed/generator_idle": self._stream.take_idle()}

    def close(self) -> None:
        self._stream.close()
        self._threads.shutdown(cancel_futures=True)
        super().close()

    def _play_alone(
        self, planned: PlannedEpisode, step: int, attempt: int, known: list[Sampled] | None
    ) -> PlayedEpisode:
        group, row = planned.place
        while True:
            number = FIRST_NUMBER + group * self._size + row
            game = Game.of(row, planned.task, planned.seed, planned.prompt, (), number)
            turns: list[Sampled] = []

            def say(active: list[Game], turn: int) -> list[Sampled]:
                turns.append(self._turn(planned, active[0].turn, turns, turn) if known is None else known[turn])  # noqa: B023
                return turns[-1:]  # noqa: B023

            name = rollout_name(planned.purpose, group, None) + (f"-{attempt}" if attempt else "")
            try:
                self._play([game], name, step, say)
            except _StaleError:
                self._num_stale += 1
                attempt += 1
                continue
            except _GivenUpError:
                self._pool.close(game.number)
                raise
            if known is None:
                self._attempts[planned.place] = attempt
                self.journal.write_entries(step, [turns_line(step, planned.place, attempt, turns)])
            return PlayedEpisode(game.turn, turns)

    def _turn(self, planned: PlannedEpisode, episode: Episode, before: list[Sampled], turn: int) -> Sampled:
        if planned.place in self._dropped:
            raise _GivenUpError(f"{self._stage.name}: episode {planned.place} was given up")
        if any(each.version() < self._oldest for each in before):
            raise _StaleError
        prompt, seed = [*episode.prompt, *episode.ids], self._turns.seed(planned.place, turn)
        return self._stream.sample(prompt, seed, self._sampling).result()
