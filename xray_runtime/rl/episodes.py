"""Rollouts of many turns: the policy replies, its environment answers, until the episode ends.

Token in, token out: what was sampled is never decoded and encoded again. A row is the prompt and, after it,

    turn   observation  turn   observation  turn
    1 1 1  0 0 0 0      1 1    0 0 0        1 1 1     response_mask
        r1                 r2                   r3    turn_rewards

The bytes of a rollout depend on neither how long environments take nor in which order they answer: each turn's seed is
derived from its episode and turn, and what is sampled together is one turn of a whole cohort. What environments answer
is kept as it comes, so that an attempt that goes on reads it there and asks only what was not asked before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import Messages, prompt_text
from xray_runtime.data.rows import Ragged, Rows, join, num_rows
from xray_runtime.data.tokenizing import decode_replies
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.environments.pool import EnvironmentFailure, EnvironmentPool
from xray_runtime.environments.protocol import Start, Step
from xray_runtime.rewards.journal import Journal
from xray_runtime.rl.sampled_replies import GENERATION_BATCH
from xray_runtime.seeding import derive_seed
from xray_runtime.training.finite import check_rollout
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.config.environment import EnvironmentConfig
    from xray_runtime.graph.kind import Stage

log = logging.getLogger(__name__)

Prompt = tuple[Messages, list[int]]
"""As messages and as tokens."""
LOG = "environments.log"
"""What environments print."""
FAILURE_CHARS = 500
METRIC_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)


@dataclass
class Episode:
    """One conversation of the policy with an environment."""

    number: int
    """In the pool."""
    row: int
    """In the rollout."""
    task: dict[str, Any]
    seed: int
    """Of the environment; one for all episodes of a group, whose rewards are compared."""
    prompt: list[int]
    replies: list[str] = field(default_factory=list)
    """The turns so far, as text."""
    ids: list[int] = field(default_factory=list)
    """Tokens after the prompt. These and the next three are of one length."""
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    """What its environment answered, to being reset and to each turn: {"answer": …} or {"failure": why}."""
    info: dict[str, float] = field(default_factory=dict)
    """Numbers that its environment gave beside the rewards, each summed over the turns."""
    ended: bool = False
    """By its environment."""
    over: bool = False
    """Ended, cut, or failed."""
    failure: str = ""
    """Why it has no reward."""
    known: int = 0
    """Answers, the reset's included, that its object in the pool has given."""

    def say(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """A turn of the policy."""
        self._add(ids, logprobs, True)

    def observe(self, ids: Sequence[int]) -> None:
        """What it reads next."""
        self._add(ids, [0.0] * len(ids), False)

    def _add(self, ids: Sequence[int], logprobs: Sequence[float], sampled: bool) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.sampled += [sampled] * len(ids)
        self.rewards += [0.0] * len(ids)

    def reward_turn(self, reward: float) -> None:
        """Put a reward on the last token of the last turn."""
        self.rewards[max(place for place, sampled in enumerate(self.sampled) if sampled)] += reward

    def inform(self, info: Mapping[str, Any]) -> None:
        """Add up the numbers in `info` of a turn, True as 1; names that no metric can have are left out."""
        for name, value in info.items():
            if isinstance(value, bool | int | float) and METRIC_NAME.fullmatch(name):
                self.info[name] = self.info.get(name, 0.0) + value

    def fail(self, why: str) -> None:
        self.failure, self.over = " ".join(why.split())[:FAILURE_CHARS], True


class Episodes:
    """Samples the rollouts of one stage whose config has an `environment`.

    Args:
        pool: where its environments work.
        sampling: of one turn.
        max_prompt: tokens that an episode may begin with.
    """

    def __init__(
        self,
        generator: ModelHandle,
        stage: Stage[Any, Any],
        sampling: Sampling,
        tokenizer: Any,
        max_prompt: int,
        pool: EnvironmentPool,
    ) -> None:
        self._generator, self._stage, self._sampling, self._pool = generator, stage, sampling, pool
        self._config: EnvironmentConfig = stage.config.environment
        self._tokenizer, self._format, self._max_prompt = tokenizer, chat_format(tokenizer), max_prompt
        self._journal = Journal(stage.kept, stage.kept_shared, stage.seal)
        # One at a time: their episodes have the same numbers.
        self._rollouts = ThreadPoolExecutor(1)
        # What no template can write is refused before anything is sampled.
        self._format.observations([{"role": "user", "content": "a"}], self._format.end_of_turn)

    def sample(
        self,
        prompts: Sequence[Prompt],
        columns: Mapping[str, Sequence[Any]],
        version: int,
        purpose: str,
        number: int = 0,
        group_size: int = 1,
        first_row: int = 0,
    ) -> Rows:
        """One episode a prompt, by policy version `version`; purpose, number and row seed it.

        Returns the columns of `Generation.generate` over whole episodes, and `prompt_ids`; of each response token
        `response_mask` and `turn_rewards`; `seed`, `turns`, `episode_reward` (NaN: it failed), `failure` [B] (why, or
        empty), and as JSON `info`, the sums of `Episode.info`, and `answers` [B].

        Args:
            columns: of the dataset, a value for each prompt.
            group_size: so many prompts in a row are one, whose episodes meet the same environment.
            first_row: of these among all that are sampled for this purpose.
        """
        stage, episodes = self._stage, []
        for place, (messages, ids) in enumerate(prompts):
            row = first_row + place
            task = {name: values[place] for name, values in columns.items()}
            task |= {"prompt": prompt_text(messages), "messages": messages}
            seed = derive_seed(stage.seed, stage.name, purpose, "environment", number, row // group_size)
            episodes.append(Episode(row, row, task, seed, list(ids)))
        size = -(-len(episodes) // self._config.cohorts)
        cohorts = [episodes[start : start + size] for start in range(0, len(episodes), size)]
        with ThreadPoolExecutor(len(cohorts)) as threads:
            running = [threads.submit(self._play, cohort, version, purpose, number) for cohort in cohorts]
            for cohort in running:
                cohort.result()
        return self._rows(episodes)

    def begin(self, *of_sample: Any) -> Future[Rows]:
        """Have another thread `sample`, after what it was told to before."""
        return self._rollouts.submit(self.sample, *of_sample)

    def close(self) -> None:
        """Wait for what another thread plays, which ends as soon as it asks a pool that was shut down."""
        self._rollouts.shutdown(cancel_futures=True)

    def sample_all(
        self,
        prompts: Sequence[Prompt],
        columns: Mapping[str, Sequence[Any]],
        version: int = 0,
        group_size: int = 1,
        done: Callable[[int], None] = lambda count: None,
    ) -> Rows:
        """The same batch by batch, for evaluations.

        Args:
            done: told how many episodes are over.
        """
        parts, places = [], []
        for start in range(0, len(prompts), GENERATION_BATCH):
            batch = slice(start, start + GENERATION_BATCH)
            of_batch = {name: values[batch] for name, values in columns.items()}
            part = self.sample(prompts[batch], of_batch, version, "sample", 0, group_size, start)
            parts.append(part)
            places.append(range(start, start + num_rows(part)))
            done(places[-1].stop)
        return join(parts, places)

    def _play(self, episodes: list[Episode], version: int, purpose: str, number: int) -> None:
        """Take the turns of a cohort until all its episodes are over."""
        name = rollout_name(purpose, number, version)
        for episode, start in self._answers(episodes, name, number):
            self._begin(episode, Start(**start))
        turn = 0
        while active := [episode for episode in episodes if not episode.over]:
            seeds = [self._seed(purpose, number, episode.row, turn) for episode in active]
            rows = {"input_ids": Ragged.of([*e.prompt, *e.ids] for e in active), "seed": np.array(seeds)}
            answer = get(self._generator.generate.remote(rows, self._sampling, version))
            check_rollout(answer, len(active), self._sampling)
            said = list(answer["response_ids"])
            texts = decode_replies(self._tokenizer, said)
            for episode, ids, logprobs, text in zip(active, said, answer["rollout_logprobs"], texts, strict=True):
                episode.say(ids.tolist(), logprobs.tolist())
                episode.replies.append(text)
            # A turn that was cut off has said nothing that could be answered.
            for episode, ended in zip(active, answer["ended"], strict=True):
                episode.over = not ended
            for episode, step in self._answers([e for e in active if not e.over], name, number):
                self._follow(episode, Step(**step))
            turn += 1
        for episode in episodes:
            self._pool.close(episode.number)

    def _seed(self, purpose: str, number: int, row: int, turn: int) -> int:
        return derive_seed(self._stage.seed, self._stage.name, purpose, number, row, turn)

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
        """What an answer makes of an episode."""
        episode.reward_turn(step.reward)
        episode.inform(step.info)
        episode.ended = step.terminated
        episode.over = step.terminated or step.truncated or len(episode.replies) >= self._config.max_turns
        if episode.over:
            return
        if not step.messages:
            episode.fail("its environment neither ended it nor said anything")
            return
        observed = self._format.observations(step.messages, episode.ids[-1])
        if len(episode.ids) + len(observed) + self._sampling.max_new_tokens > self._config.max_tokens:
            episode.over = True
            return
        episode.observe(observed)

    def _answers(self, episodes: list[Episode], name: str, step: int) -> Iterator[tuple[Episode, dict[str, Any]]]:
        """What the environments answer to the last replies, or to being reset; episodes that fail are left out."""
        keys = {episode.row: answer_key(name, episode.row, episode.replies) for episode in episodes}
        found = {row: self._journal.entry(key) for row, key in keys.items()}
        asked = {e.row: self._ask(e) for e in episodes if found[e.row] is None}
        fresh = []
        for episode in episodes:
            entry = found[episode.row]
            if entry is None:
                entry = {"key": keys[episode.row], "source": "environment", "step": step}
                entry |= _outcome(asked[episode.row])
                fresh.append(entry)
                found[episode.row] = entry
        # On disk before it is used: a clock or a service would say something else the next time.
        self._journal.write_entries(step, fresh)
        for episode in episodes:
            entry = found[episode.row] or {}
            episode.answers.append({name: entry[name] for name in ("answer", "failure") if name in entry})
            if "failure" in entry:
                log.warning("%s, row %d: %s", name, episode.row, entry["failure"])
                episode.fail(entry["failure"])
            else:
                yield episode, entry["answer"]

    def _ask(self, episode: Episode) -> list[Future[Any]]:
        """Have the environment answer the last reply; one that an attempt before this one spoke with is brought there
        first. The last future is the answer."""
        futures: list[Future[Any]] = []
        if not episode.known:
            futures.append(self._pool.reset(episode.number, episode.task, episode.seed))
            episode.known = 1
        for reply in episode.replies[episode.known - 1 :]:
            if futures:
                _wait(futures[-1])
            futures.append(self._pool.step(episode.number, reply))
            episode.known += 1
        return futures

    def _rows(self, episodes: list[Episode]) -> Rows:
        for episode in episodes:
            if not episode.ids:
                # It failed before its first turn; a row must have a token, and without a reward nothing learns from it.
                episode.say([self._format.end_of_turn], [0.0])
        rewards = [np.nan if e.failure else float(np.sum(e.rewards)) for e in episodes]
        return {
            "prompt_ids": Ragged.of(e.prompt for e in episodes),
            "response_ids": Ragged.of(e.ids for e in episodes),
            "rollout_logprobs": Ragged.of((e.logprobs for e in episodes), np.float32),
            "response_mask": Ragged.of((e.sampled for e in episodes), np.bool_),
            "turn_rewards": Ragged.of((e.rewards for e in episodes), np.float32),
            "ended": np.array([e.ended for e in episodes]),
            "seed": np.array([e.seed for e in episodes]),
            "turns": np.array([len(e.replies) for e in episodes], np.int32),
            "episode_reward": np.array(rewards, np.float64),
            "failure": np.array([e.failure for e in episodes], object),
            "info": np.array([json.dumps(e.info, sort_keys=True) for e in episodes], object),
            "answers": np.array([json.dumps(e.answers, sort_keys=True) for e in episodes], object),
        }


@contextmanager
def open_episodes(
    stage: Stage[Any, Any],
    generator: ModelHandle,
    sampling: Sampling,
    tokenizer: Any,
    max_prompt: int,
    log_dir: Any,
) -> Iterator[Episodes | None]:
    """The episodes of a stage, with processes for its environments; None where it has no environment."""
    config = stage.config.environment
    if config is None:
        yield None
        return
    limits = config.num_workers, config.timeout_s, config.memory_mb
    with ExitStack() as stack:
        pool = EnvironmentPool(config.path, *limits, log_dir / LOG)
        episodes = Episodes(generator, stage, sampling, tokenizer, max_prompt, pool)
        stack.callback(episodes.close)
        stack.enter_context(pool)
        yield episodes


def episode_means(sampled: Rows) -> dict[str, float]:
    """Means over episodes that did not fail: `turns`, and `info/NAME` of each number that environments gave beside
    rewards, summed over an episode (0 where it gave none)."""
    there = sampled["failure"] == ""
    infos = [json.loads(text) for text in sampled["info"][there].tolist()]
    names = sorted({name for info in infos for name in info})
    means = {f"info/{name}": float(np.mean([info.get(name, 0.0) for info in infos])) for name in names}
    return {"turns": float(sampled["turns"][there].mean()), **means} if infos else {}


def rollout_name(purpose: str, number: int, version: int) -> str:
    """Of what is sampled at a time; of two versions each is answered by itself, also where they say the same."""
    return f"{purpose}-{number}-{version}"


def answer_key(rollout: str, row: int, replies: Sequence[str]) -> str:
    """Of what the environment of a row answers to the last of `replies`; of none: to being reset."""
    return hashlib.sha256(json.dumps([rollout, row, *replies]).encode()).hexdigest()[:32]


def _outcome(futures: list[Future[Any]]) -> dict[str, Any]:
    try:
        # Of what failed on the way the first is the cause.
        return {"answer": asdict([future.result() for future in futures][-1])}
    except EnvironmentFailure as error:
        return {"failure": str(error)}


def _wait(future: Future[Any]) -> None:
    """Until it is done; what failed shows in the next answer."""
    future.exception()
