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
from xray_runtime.kernel.errors import shown
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.environment_protocol import Start, Step
from xray_runtime.methods.common.sampling.episode import Episode, EpisodeBatch, Game, no_turn, rollout_of
from xray_runtime.methods.common.sampling.reply_stream import Sampled
from xray_runtime.methods.common.teacher_prompts import TeacherPrompts
from xray_runtime.methods.common.training.finite import check_rollout
from xray_runtime.rewards.journal import Journal

if TYPE_CHECKING:
    from xray_runtime.methods.common.environment import EnvironmentConfig
    from xray_runtime.methods.common.sampling.episode_source import SamplerSetup

log = logging.getLogger(__name__)

Say = Callable[[list[Game], int], list[Sampled]]
"""(episodes that go on, number of the turn) → the turn of each."""


class Episodes:
    """Samples the rollouts of one stage whose environment answers turn by turn."""

    def __init__(self, setup: SamplerSetup, pool: EnvironmentPool) -> None:
        self._stage = stage = setup.stage
        self._pool, self._max_prompt = pool, setup.max_prompt
        self._generator, self._sampling, self._tokenizer = setup.generator, setup.sampling, setup.tokenizer
        self._config: EnvironmentConfig = stage.config.environment
        self._champion = setup.champion
        if setup.champion is not None:
            # It reads and says tokens of the policy's vocabulary; raises ValueError: it has another.
            TeacherPrompts(f"{stage.name}.champion", stage.inputs.champion.path, setup.tokenizer)
        self._format = chat_format(setup.tokenizer)
        self.journal = Journal(stage.kept, stage.kept_shared, stage.seal)
        # One rollout at a time: episodes of two would have the same numbers.
        self._rollouts = ThreadPoolExecutor(1)
        # A template that cannot write observations fails here, before anything is sampled.
        self._format.observations([{"role": "user", "content": "a"}], self._format.end_of_turn)

    def sample(self, batch: EpisodeBatch) -> Rollout:
        assert batch.version is not None
        seats = self._config.seats
        games = [Game.of(*start, seats) for start in batch.starts(self._stage)]
        size = -(-len(games) // self._config.cohorts)
        cohorts = [games[start : start + size] for start in range(0, len(games), size)]
        with ThreadPoolExecutor(len(cohorts)) as threads:
            say = partial(self._say, batch)
            running = [threads.submit(self._play, cohort, batch.name, batch.number, say) for cohort in cohorts]
            for cohort in running:
                cohort.result()
        rows: list[Episode] = []
        for start in range(0, len(games), batch.group_size):
            group = games[start : start + batch.group_size]
            rows += [game.rows[seat] for seat in self._config.policy_seats or ("",) for game in group]
        return rollout_of(rows, batch.version)

    def begin(self, batch: EpisodeBatch) -> Future[Rollout]:
        """Call `sample` in another thread, after earlier calls of `begin`."""
        return self._rollouts.submit(self.sample, batch)

    def close(self) -> None:
        """Wait for the other thread, which ends at its next request once the pool is shut down."""
        self._rollouts.shutdown(cancel_futures=True)

    def metrics(self, episodes: Rollout) -> dict[str, float]:
        return {}

    def _play(self, games: list[Game], name: str, step: int, say: Say) -> None:
        """Play the turns of a cohort until all its episodes are over."""
        for game, start in self._answers(games, name, step):
            self._begin(game, Start(**start))
        turn = 0
        while active := [game for game in games if not game.over]:
            replies = say(active, turn)
            texts = decode_replies(self._tokenizer, [reply.ids for reply in replies])
            for game, reply, text in zip(active, replies, texts, strict=True):
                game.turn.say(reply.ids, reply.logprobs)
                game.replies.append(text)
                if not reply.ended:
                    game.cut()  # an environment cannot answer it
            for game, answer in self._answers([game for game in active if not game.over], name, step):
                self._follow(game, Step(**answer))
            turn += 1
        for game in games:
            self._pool.close(game.number)
            for episode in game.rows.values():
                if not episode.ids:
                    # It failed before its first turn. A row must have a token; nothing learns from a row without a
                    # reward.
                    episode.say([self._format.end_of_turn], [0.0])
                    episode.turns, episode.failure = 0, episode.failure or no_turn(episode.seat)

    def _say(self, batch: EpisodeBatch, active: list[Game], turn: int) -> list[Sampled]:
        """The next turn of each episode, by the policy or the champion."""
        stage, version = self._stage, batch.version
        assert version is not None
        found: dict[int, Sampled] = {}
        champion = [game for game in active if game.seat in self._config.champion_seats]
        policy = [game for game in active if game.seat not in self._config.champion_seats]
        for games, generate in ((policy, self._generate), (champion, self._of_champion)):
            if not games:
                continue
            seeds = [derive_seed(stage.seed, stage.name, batch.purpose, batch.number, g.row, turn) for g in games]
            so_far = Ragged.of([*game.turn.prompt, *game.turn.ids] for game in games)
            rows = PromptBatch(input_ids=so_far, seed=np.array(seeds))
            answer = generate(rows, self._sampling, version)
            columns = zip(games, answer.response_ids, answer.rollout_logprobs, answer.ended, strict=True)
            for game, ids, logprobs, ended in columns:
                found[game.row] = Sampled(ids.tolist(), logprobs.tolist(), bool(ended), [])
        return [found[game.row] for game in active]

    def _generate(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        answer = get(self._generator.generate.remote(rows, sampling, version))
        check_rollout(answer, len(rows), sampling)
        return answer

    def _of_champion(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        """As `_generate`, by the champion, whose weights never change."""
        assert self._champion is not None
        answer = get(self._champion.generate.remote(rows, sampling, 0))
        check_rollout(answer, len(rows), sampling)
        return answer

    def _begin(self, game: Game, start: Start) -> None:
        if not self._pass_to(game, start.seat) or (start.messages is None and start.tools is None):
            return
        [game.turn.prompt] = self._format.prompts([start.prompt(game.task["messages"])])
        if len(game.turn.prompt) > self._max_prompt:
            raise ValueError(
                f"{self._stage.name}.environment: an episode begins with {len(game.turn.prompt)} tokens, more than the "
                f"{self._max_prompt} of data.max_prompt_tokens"
            )

    def _follow(self, game: Game, step: Step) -> None:
        """Apply an environment's answer to its episode."""
        game.turn.reward_turn(step.reward)
        for seat, reward in step.rewards.items():
            if not self._has_seat(game, seat):
                return
            if game.rows[seat].turns:
                game.rows[seat].reward_turn(reward)
        for episode in game.rows.values():
            episode.inform(step.info)
        if step.terminated:
            game.end()
        game.over = step.terminated or step.truncated or len(game.replies) >= self._config.max_turns
        if game.over or not self._pass_to(game, step.seat):
            return
        if not game.turn.turns:
            self._first_turn(game, step.messages)
            return
        if not step.messages:
            game.fail("its environment neither ended the episode nor returned a message")
            return
        observed = self._format.observations(step.messages, game.turn.ids[-1])
        if len(game.turn.ids) + len(observed) + self._sampling.max_new_tokens > self._config.max_tokens:
            game.over = True
            return
        game.turn.observe(observed)

    def _first_turn(self, game: Game, messages: list[dict[str, Any]]) -> None:
        """Begin the row of a seat that replies for the first time."""
        if messages:
            [game.turn.prompt] = self._format.prompts([messages])
        if len(game.turn.prompt) > self._max_prompt:
            limit = f"the {self._max_prompt} of data.max_prompt_tokens"
            game.fail(f"seat {game.seat!r} begins with {len(game.turn.prompt)} tokens, more than {limit}")

    def _pass_to(self, game: Game, seat: str) -> bool:
        """Make it the turn of `seat`; "": of the same. False: the episode failed, since there is no such seat."""
        if seat and not self._has_seat(game, seat):
            return False
        game.seat = seat or game.seat
        return True

    def _has_seat(self, game: Game, seat: str) -> bool:
        if seat in game.rows:
            return True
        known = ", ".join(self._config.seats) or "empty"
        game.fail(f"its environment named the seat {shown(seat)}, but environment.seats is {known}")
        return False

    def _answers(self, games: list[Game], name: str, step: int) -> Iterator[tuple[Game, dict[str, Any]]]:
        """The environments' answers to the last replies, or to the reset. Episodes that fail are left out."""
        keys = {game.row: answer_key(name, game.row, game.replies) for game in games}
        entries = {row: self.journal.entry(key) for row, key in keys.items()}
        requests = {game.row: self._request(game) for game in games if entries[game.row] is None}
        fresh = []
        for game in games:
            entry = entries[game.row]
            if entry is None:
                entry = {"key": keys[game.row], "source": "environment", "step": step}
                entry |= _outcome(requests[game.row])
                fresh.append(entry)
                entries[game.row] = entry
        # Written before use: an environment with a clock or a service would answer differently the next time.
        self.journal.write_entries(step, fresh)
        for game in games:
            entry = entries[game.row] or {}
            of_seat = {"seat": game.seat, "reply": game.replies[-1]} if game.replies and self._config.seats else {}
            game.answers.append(of_seat | {name: entry[name] for name in ("answer", "failure") if name in entry})
            if "failure" in entry:
                log.warning("%s, row %d: %s", name, game.row, entry["failure"])
                game.fail(entry["failure"])
            else:
                yield game, entry["answer"]

    def _request(self, game: Game) -> list[Future[Any]]:
        """Send the last reply to the environment; after a resume, replay the earlier replies first. The last future is
        the answer."""
        futures: list[Future[Any]] = []
        if not game.known:
            futures.append(self._pool.reset(game.number, game.task, game.seed))
            game.known = 1
        for reply in game.replies[game.known - 1 :]:
            if futures:
                futures[-1].exception()  # waits for it; a failure surfaces in the next answer
            futures.append(self._pool.step(game.number, split_reasoning(reply)[1]))
            game.known += 1
        return futures


def answer_key(rollout: str, row: int, replies: Sequence[str]) -> str:
    """Journal key of the environment's answer to the last of `replies`, or to the reset if there are none."""
    return hashlib.sha256(json.dumps([rollout, row, *replies]).encode()).hexdigest()[:32]


def _outcome(futures: list[Future[Any]]) -> dict[str, Any]:
    try:
        # `result` raises the first failure, which is the cause of any later one.
        answer = asdict([future.result() for future in futures][-1])
        # Games of one leave these out.
        return {"answer": {name: given for name, given in answer.items() if given or name not in ("seat", "rewards")}}
    except EnvironmentFailure as error:
        return {"failure": str(error)}
