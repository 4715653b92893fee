"""Rollouts of many turns: the policy replies and its environment answers until the episode ends.

Token in, token out: sampled tokens are never decoded and encoded again (`methods.common.sampling.episode` shows a row).

A rollout's bytes do not depend on how long environments take or in which order they answer: each turn's seed is derived
from its episode and turn, and a batch is one turn of a whole cohort. Answers of environments are journaled as they
arrive; a resumed attempt reads them from the journal and requests only the missing ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.agents.environments.episodes import EnvironmentFailure
from xray_runtime.agents.environments.pool import EnvironmentPool
from xray_runtime.cluster.protocols import get
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Rollout
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.reasoning import split_reasoning
from xray_runtime.data.tokenizing import decode_replies
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.environment_protocol import Start, Step
from xray_runtime.methods.common.sampling.episode import Episode, EpisodeBatch, rollout_of
from xray_runtime.methods.common.sampling.reply_stream import Sampled
from xray_runtime.methods.common.training.finite import check_rollout
from xray_runtime.rewards.journal import Journal

if TYPE_CHECKING:
    from xray_runtime.methods.common.environment import EnvironmentConfig
    from xray_runtime.methods.common.sampling.episode_source import SamplerSetup

log = logging.getLogger(__name__)

Say = Callable[[list[Episode], int], list[Sampled]]
"""(episodes that go on, number of the turn) → the turn of each."""


class Episodes:
    """Samples the rollouts of one stage whose environment answers turn by turn."""

    def __init__(self, setup: SamplerSetup, pool: EnvironmentPool) -> None:
        self._stage = stage = setup.stage
        self._pool, self._max_prompt = pool, setup.max_prompt
        self._generator, self._sampling, self._tokenizer = setup.generator, setup.sampling, setup.tokenizer
        self._config: EnvironmentConfig = stage.config.environment
        self._format = chat_format(setup.tokenizer)
        self.journal = Journal(stage.kept, stage.kept_shared, stage.seal)
        # One rollout at a time: episodes of two would have the same numbers.
        self._rollouts = ThreadPoolExecutor(1)
        # A template that cannot write observations fails here, before anything is sampled.
        self._format.observations([{"role": "user", "content": "a"}], self._format.end_of_turn)

    def sample(self, batch: EpisodeBatch) -> Rollout:
        assert batch.version is not None
        episodes = [Episode(row, row, task, seed, ids) for row, task, seed, ids in batch.starts(self._stage)]
        size = -(-len(episodes) // self._config.cohorts)
        cohorts = [episodes[start : start + size] for start in range(0, len(episodes), size)]
        with ThreadPoolExecutor(len(cohorts)) as threads:
            say = partial(self._say, batch)
            running = [threads.submit(self._play, cohort, batch.name, batch.number, say) for cohort in cohorts]
            for cohort in running:
                cohort.result()
        return rollout_of(episodes, batch.version)

    def begin(self, batch: EpisodeBatch) -> Future[Rollout]:
        """Call `sample` in another thread, after earlier calls of `begin`."""
        return self._rollouts.submit(self.sample, batch)

    def close(self) -> None:
        """Wait for the other thread, which ends at its next request once the pool is shut down."""
        self._rollouts.shutdown(cancel_futures=True)

    def metrics(self, episodes: Rollout) -> dict[str, float]:
        return {}

    def _play(self, episodes: list[Episode], name: str, step: int, say: Say) -> None:
        """Play the turns of a cohort until all its episodes are over."""
        for episode, start in self._answers(episodes, name, step):
            self._begin(episode, Start(**start))
        turn = 0
        while active := [episode for episode in episodes if not episode.over]:
            replies = say(active, turn)
            for episode, reply, text in zip(
                active, replies, decode_replies(self._tokenizer, [reply.ids for reply in replies]), strict=True
            ):
                episode.say(reply.ids, reply.logprobs)
                episode.replies.append(text)
                # An environment cannot answer a turn that was cut off.
                episode.over = not reply.ended
            for episode, answer in self._answers([e for e in active if not e.over], name, step):
                self._follow(episode, Step(**answer))
            turn += 1
        for episode in episodes:
            self._pool.close(episode.number)
            if not episode.ids:
                # It failed before its first turn. A row must have a token; nothing learns from a row without a reward.
                episode.say([self._format.end_of_turn], [0.0])

    def _say(self, batch: EpisodeBatch, active: list[Episode], turn: int) -> list[Sampled]:
        """The next turn of each episode."""
        stage, version = self._stage, batch.version
        assert version is not None
        seeds = [derive_seed(stage.seed, stage.name, batch.purpose, batch.number, e.row, turn) for e in active]
        rows = PromptBatch(input_ids=Ragged.of([*e.prompt, *e.ids] for e in active), seed=np.array(seeds))
        answer = self._generate(rows, self._sampling, version)
        columns = zip(answer.response_ids, answer.rollout_logprobs, answer.ended, strict=True)
        return [Sampled(ids.tolist(), logprobs.tolist(), bool(ended), []) for ids, logprobs, ended in columns]

    def _generate(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        answer = get(self._generator.generate.remote(rows, sampling, version))
        check_rollout(answer, len(rows), sampling)
        return answer

    def _begin(self, episode: Episode, start: Start) -> None:
        if start.messages is None and start.tools is None:
            return
        [episode.prompt] = self._format.prompts([start.prompt(episode.task["messages"])])
        if len(episode.prompt) > self._max_prompt:
            raise ValueError(
                f"{self._stage.name}.environment: an episode begins with {len(episode.prompt)} tokens, more than the "
                f"{self._max_prompt} of data.max_prompt_tokens"
            )

    def _follow(self, episode: Episode, step: Step) -> None:
        """Apply an environment's answer to its episode."""
        episode.reward_turn(step.reward)
        episode.inform(step.info)
        episode.ended = step.terminated
        episode.over = step.terminated or step.truncated or len(episode.replies) >= self._config.max_turns
        if episode.over:
            return
        if not step.messages:
            episode.fail("its environment neither ended the episode nor returned a message")
            return
        observed = self._format.observations(step.messages, episode.ids[-1])
        if len(episode.ids) + len(observed) + self._sampling.max_new_tokens > self._config.max_tokens:
            episode.over = True
            return
        episode.observe(observed)

    def _answers(self, episodes: list[Episode], name: str, step: int) -> Iterator[tuple[Episode, dict[str, Any]]]:
        """The environments' answers to the last replies, or to the reset. Episodes that fail are left out."""
        keys = {episode.row: answer_key(name, episode.row, episode.replies) for episode in episodes}
        entries = {row: self.journal.entry(key) for row, key in keys.items()}
        requests = {e.row: self._request(e) for e in episodes if entries[e.row] is None}
        fresh = []
        for episode in episodes:
            entry = entries[episode.row]
            if entry is None:
                entry = {"key": keys[episode.row], "source": "environment", "step": step}
                entry |= _outcome(requests[episode.row])
                fresh.append(entry)
                entries[episode.row] = entry
        # Written before use: an environment with a clock or a service would answer differently the next time.
        self.journal.write_entries(step, fresh)
        for episode in episodes:
            entry = entries[episode.row] or {}
            episode.answers.append({name: entry[name] for name in ("answer", "failure") if name in entry})
            if "failure" in entry:
                log.warning("%s, row %d: %s", name, episode.row, entry["failure"])
                episode.fail(entry["failure"])
            else:
                yield episode, entry["answer"]

    def _request(self, episode: Episode) -> list[Future[Any]]:
        """Send the last reply to the environment; after a resume, replay the earlier replies first. The last future is
        the answer."""
        futures: list[Future[Any]] = []
        if not episode.known:
            futures.append(self._pool.reset(episode.number, episode.task, episode.seed))
            episode.known = 1
        for reply in episode.replies[episode.known - 1 :]:
            if futures:
                futures[-1].exception()  # waits for it; a failure surfaces in the next answer
            futures.append(self._pool.step(episode.number, split_reasoning(reply)[1]))
            episode.known += 1
        return futures


def answer_key(rollout: str, row: int, replies: Sequence[str]) -> str:
    """Journal key of the environment's answer to the last of `replies`, or to the reset if there are none."""
    return hashlib.sha256(json.dumps([rollout, row, *replies]).encode()).hexdigest()[:32]


def _outcome(futures: list[Future[Any]]) -> dict[str, Any]:
    try:
        # `result` raises the first failure, which is the cause of any later one.
        return {"answer": asdict([future.result() for future in futures][-1])}
    except EnvironmentFailure as error:
        return {"failure": str(error)}
