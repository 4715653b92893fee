"""Single replies that are sampled while the weights change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from xray_runtime.cluster.protocols import get
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Rollout
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.sampling.in_flight_source import AnySource
from xray_runtime.methods.common.sampling.journaled_turns import JournaledTurns, Place, turns_line, version_columns
from xray_runtime.methods.common.sampling.reply_stream import ReplyStream, Sampled, by_token
from xray_runtime.methods.common.training.finite import check_rollout
from xray_runtime.rewards.journal import Journal

if TYPE_CHECKING:
    from xray_runtime.engines.sampling import Sampling
    from xray_runtime.methods.common.sampling.episode import EpisodeBatch
    from xray_runtime.methods.common.sampling.episode_source import EpisodeSampler, SamplerSetup


@dataclass(frozen=True)
class PlannedReply:
    place: Place
    prompt: list[int]


@dataclass(frozen=True)
class _Begun:
    place: Place
    attempt: int
    step: int


class RepliesInFlight:
    """The replies of one stage."""

    def __init__(self, setup: SamplerSetup) -> None:
        stage = setup.stage
        self._generator, self._sampling = setup.generator, setup.sampling
        self.journal = Journal(stage.kept, stage.kept_shared, stage.seal)
        self._turns = JournaledTurns(stage, self.journal)
        self.stream = ReplyStream(self._generate, self._keep)
        self._attempts: dict[Place, int] = {}

    def planned(self, batch: EpisodeBatch) -> list[PlannedReply]:
        return [PlannedReply((batch.number, row), list(ids)) for row, (_, ids) in enumerate(batch.prompts)]

    def start(self, planned: PlannedReply, step: int, stale: Sampled | None = None) -> Future[Sampled]:
        place = planned.place
        if stale is None and (found := self._turns.find(place)) is not None:
            self._attempts[place], [turn] = found
            done: Future[Sampled] = Future()
            done.set_result(turn)
            return done
        self._attempts[place] = self._attempts.get(place, -1) + 1
        begun = _Begun(place, self._attempts[place], step)
        return self.stream.sample(planned.prompt, self._turns.seed(place, 0), self._sampling, tag=begun)

    def drop(self, planned: PlannedReply, reply: Future[Sampled]) -> None:
        reply.cancel()

    def rollout(self, planned: Sequence[PlannedReply], played: Sequence[Sampled], version: int) -> Rollout:
        replies = Rollout(
            response_ids=Ragged.of(reply.ids for reply in played),
            rollout_logprobs=Ragged.of((reply.logprobs for reply in played), np.float32),
            ended=np.array([reply.ended for reply in played]),
            seed=np.array([self._turns.seed(plan.place, 0) for plan in planned]),
            **version_columns([by_token(reply.versions) for reply in played]),
        )
        check_rollout(replies, len(planned), self._sampling)
        return replies

    @contextmanager
    def updating(self, version: int, oldest: int) -> Iterator[None]:
        with self.stream.updating(version, oldest):
            yield

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        return {"speed/generator_idle": self.stream.take_idle()}

    def take_stale(self) -> int:
        return self.stream.take_stale()

    def close(self) -> None:
        self.stream.close()

    def _keep(self, ended: list[tuple[_Begun, Sampled]]) -> None:
        self.journal.write_entries(
            max((begun.step for begun, _ in ended), default=0),
            [turns_line(begun.step, begun.place, begun.attempt, [reply]) for begun, reply in ended],
        )

    def _generate(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        answer = get(self._generator.generate.remote(rows, sampling, version))
        check_rollout(answer, len(rows), sampling)
        return answer


@contextmanager
def open_in_flight(setup: SamplerSetup, episodes: EpisodeSampler | None) -> Iterator[AnySource | None]:
    """The replies, or the `episodes`, of a stage with `in_flight_updates`; None without."""
    if not setup.stage.config.in_flight_updates:
        yield None
    elif episodes is not None:
        # They were opened for this.
        yield cast("AnySource", episodes)
    else:
        with closing(RepliesInFlight(setup)) as replies:
            yield replies
