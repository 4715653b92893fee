"""Rollouts of agents: each episode runs an agent once, which calls the policy through the gateway.

A rollout's bytes do not depend on how long agents take or in which order they call: a call's seed derives from its
place in its episode (`agents.segments`), and replies do not depend on their batch. Each call is journaled before it is
answered, and each result before it is used. After a kill, episodes that ended are read from the journal; the others run
again and are answered from it. A record in the journal, which a replay takes from the ledger, is sampled again without
its agent.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.agents.episode import AgentEpisode, EpisodeLimits, Policy, call_from_json, call_to_json
from xray_runtime.agents.gateway import Gateway
from xray_runtime.agents.outcomes import Outcome
from xray_runtime.agents.runner import Address, Runner, open_runner
from xray_runtime.agents.segments import Call, rows
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.rows import Ragged, Rows
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.rewards.journal import Journal
from xray_runtime.rl.agent_records import (
    Record,
    read_calls,
    read_episodes,
    rollout_of_records,
    write_episodes,
    written_calls,
)
from xray_runtime.rl.episode import EpisodeBatch
from xray_runtime.rl.types import Rollout
from xray_runtime.seeding import derive_seed
from xray_runtime.training.finite import check_rollout
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.config.environment import AgentConfig
    from xray_runtime.graph.kind import Stage

log = logging.getLogger(__name__)

AGENT = "agent"
"""The journal's source."""
POLL_S = 0.5
"""How often the wait for an agent looks whether the generator failed."""
FAILURE_CHARS = 500


@dataclass(frozen=True)
class _Planned:
    """An episode to play."""

    name: str
    """In its rollout; seeds derive from it."""
    rollout: str
    row: int
    task: dict[str, Any]
    seed: int
    """The task's, shared by a group."""
    prompt: list[int]
    keep: bool

    def key(self, *parts: Any) -> str:
        """A key of the journal."""
        return hashlib.sha256(repr((AGENT, self.rollout, self.row, *parts)).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class _Played:
    record: Record
    calls: list[Call]
    ran_again: int = 0


class AgentEpisodes:
    """Samples the rollouts of one stage whose environment is an agent; `rl.episodes.EpisodeSampler`.

    Args:
        sampling: parameters for one reply.
        max_prompt: the longest prompt of the dataset, which the context leaves room for.
        log_path: file for the agents' output.
        records: file for the records of batches to keep.
    """

    def __init__(
        self,
        generator: ModelHandle,
        stage: Stage[Any, Any],
        sampling: Sampling,
        tokenizer: Any,
        max_prompt: int,
        log_path: Path,
        records: Path,
    ) -> None:
        self._generator, self._stage, self._sampling, self._log_path = generator, stage, sampling, log_path
        self._config: AgentConfig = stage.config.environment
        self._tokenizer, self._format = tokenizer, chat_format(tokenizer)
        config, context = self._config, max_prompt + self._config.max_tokens
        leaves_out = config.untrainable == "leave_out"
        self._limits = EpisodeLimits(config.max_calls, config.max_sampled_tokens, context, leaves_out)
        self._journal = Journal(stage.kept, stage.kept_shared, stage.seal)
        self._known: dict[str, dict[str, Call]] = {}
        """Episode in a rollout → calls of an earlier attempt."""
        for entry in self._journal.entries(AGENT):
            if "call" in entry:
                call = call_from_json(entry["call"])
                self._known.setdefault(entry["episode"], {})[call.key] = call
        self._records_path, self._records = records, read_episodes(records)
        # A resumed attempt does not play all episodes of the earlier one again.
        self._records |= {tuple(e["kept"]): e["record"] for e in self._journal.entries(AGENT) if "kept" in e}
        self._gateway = Gateway(self._generate, config.host)
        self._runner: Runner | None = None
        self._lock, self._is_closed = threading.Lock(), False
        # One rollout at a time: episodes of two would have the same names.
        self._rollouts = ThreadPoolExecutor(1)

    def sample(self, batch: EpisodeBatch) -> Rollout:
        """Run an agent for each prompt of a batch."""
        planned = [
            _Planned(
                f"{batch.purpose}-{batch.number}-{row}", batch.name, row, {"seed": seed} | task, seed, ids, batch.keep
            )
            for row, task, seed, ids in batch.starts(self._stage)
        ]
        replayed = self._replayed(planned, batch.version)
        rest = [episode for episode in planned if episode.name not in replayed]
        with ThreadPoolExecutor(min(self._config.concurrency, max(1, len(rest)))) as threads:
            played = list(threads.map(partial(self._play, batch.version, batch.number), rest))
        by_name = replayed | {episode.name: of for episode, of in zip(rest, played, strict=True)}
        found = [by_name[episode.name] for episode in planned]
        if batch.keep:
            self._records |= {(e.rollout, e.row): of.record for e, of in zip(planned, found, strict=True)}
        return rollout_of_records(
            [episode.record for episode in found],
            [episode.calls for episode in found],
            [episode.prompt for episode in planned],
            [episode.seed for episode in planned],
            [episode.row for episode in planned],
            [episode.ran_again for episode in found],
            self._format.end_of_turn,
            batch.version,
        )

    def begin(self, batch: EpisodeBatch) -> Future[Rollout]:
        """Call `sample` in another thread, after earlier calls of `begin`."""
        return self._rollouts.submit(self.sample, batch)

    def close(self) -> None:
        """End all agents and stop answering."""
        with self._lock:
            self._is_closed = True
            if self._runner is not None:
                self._runner.close()
        self._rollouts.shutdown(cancel_futures=True)
        self._gateway.close()
        if self._records:
            write_episodes(self._records_path, self._records)

    def _generate(self, rows: Rows, sampling: Sampling, version: int) -> Rows:
        answer = get(self._generator.generate.remote(rows, sampling, version))
        check_rollout(answer, len(rows["seed"]), sampling)
        return answer

    def _open_runner(self) -> Runner:
        # Late, because a replay needs no agent.
        with self._lock:
            if self._runner is None:
                self._runner = open_runner(self._config, self._log_path)
            return self._runner

    def _play(self, version: int, step: int, planned: _Planned) -> _Played:
        """Run the agent of one episode until it has a result, or fails."""
        attempt = 0
        while self._journal.entry(planned.key("anew", attempt)) is not None:
            attempt += 1
        ran_again = 0
        while True:
            name = f"{planned.name}-{attempt}" if attempt else planned.name
            known = self._known.get(f"{planned.rollout}/{name}", {})
            end = self._journal.entry(planned.key("end", attempt))
            if end is not None:
                return _Played(end["record"], [known[call["key"]] for call in end["record"]["calls"]], end["ran_again"])
            episode, outcome = self._run(planned, name, known, version, step)
            if outcome.infrastructure is not None and ran_again < self._config.retries:
                log.warning("%s: %s; the agent runs again", name, outcome.infrastructure)
                ran_again += 1
                self._known[f"{planned.rollout}/{name}"] = known | {call.key: call for call in episode.calls()}
                continue
            difference = episode.difference() if outcome.infrastructure is None else None
            if difference is None:
                break
            if self._config.changed == "fail":
                raise RuntimeError(f"{self._stage.name}, {name}: {difference}")
            log.warning("%s begins anew: %s", name, difference)
            self._journal.write_entries(step, [self._entry(planned.key("anew", attempt), step)])
            attempt += 1
        record = _record_of(episode, outcome)
        record["counts"]["begun_anew"] = attempt
        kept = {"kept": [planned.rollout, planned.row]} if planned.keep else {}
        ended = {"record": record, "ran_again": ran_again} | kept
        self._journal.write_entries(step, [self._entry(planned.key("end", attempt), step) | ended])
        if record["failure"]:
            log.warning("%s: %s", name, record["failure"])
        return _Played(record, episode.calls(), ran_again)

    def _run(
        self, planned: _Planned, name: str, known: Mapping[str, Call], version: int, step: int
    ) -> tuple[AgentEpisode, Outcome]:
        """One run of an agent."""
        changed = threading.Event()
        policy = Policy(
            self._format,
            lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=True)),
            self._gateway.sampler,
            self._sampling,
            version,
            lambda key: derive_seed(self._stage.seed, self._stage.name, AGENT, key),
            partial(self._keep, planned, name, step),
        )
        episode = AgentEpisode(name, policy, self._limits, known, changed.set)
        self._gateway.open(episode)
        run = self._open_runner().start(planned.task, Address(self._gateway.url(episode), episode.secret))
        run.outcome.add_done_callback(lambda _: changed.set())
        while not changed.wait(POLL_S) and self._gateway.sampler.failure is None:
            pass
        if not run.outcome.done():
            run.stop()
        outcome = run.outcome.result()
        self._gateway.call(partial(_take, episode, outcome))
        self._gateway.forget(episode)
        if self._gateway.sampler.failure is not None:
            raise self._gateway.sampler.failure
        if self._is_closed:
            raise RuntimeError(f"{self._stage.name}: the stage ended before {name}")
        return episode, outcome

    def _keep(self, planned: _Planned, name: str, step: int, calls: Iterable[Call]) -> None:
        entries = [
            self._entry(planned.key(name, call.key), step)
            | {"episode": f"{planned.rollout}/{name}", "call": call_to_json(call)}
            for call in calls
        ]
        self._journal.write_entries(step, entries)

    def _entry(self, key: str, step: int) -> dict[str, Any]:
        return {"key": key, "source": AGENT, "step": step}

    def _replayed(self, planned: Sequence[_Planned], version: int) -> dict[str, _Played]:
        """The episodes whose records a replay took from a ledger, with their trained calls sampled again."""
        entries = {episode.name: self._journal.entry(record_key(episode.rollout, episode.row)) for episode in planned}
        records = {name: entry["record"] for name, entry in entries.items() if entry is not None}
        calls = {name: read_calls(record) for name, record in records.items()}
        samplings: dict[Sampling, list[tuple[str, Call]]] = {}
        for name, of_episode in calls.items():
            for call in of_episode.values():
                if call.is_trained:
                    samplings.setdefault(replace(self._sampling, **call.options), []).append((name, call))
        for sampling, batch in samplings.items():
            seeds = np.array([call.seed for _, call in batch])
            prompts: Rows = {"input_ids": Ragged.of(call.prompt for _, call in batch), "seed": seeds}
            answer = self._generate(prompts, sampling, version)
            replies = zip(answer["response_ids"], answer["rollout_logprobs"], strict=True)
            for (name, call), (ids, logprobs) in zip(batch, replies, strict=True):
                calls[name][call.key] = replace(call, ids=ids.tolist(), logprobs=logprobs.tolist())
        return {
            name: _Played(record | {"calls": _with_ids(record, calls[name])}, list(calls[name].values()))
            for name, record in records.items()
        }


def record_key(rollout: str, row: int) -> str:
    """Journal key of a record that a replay takes from the ledger."""
    return hashlib.sha256(repr((AGENT, "replay", rollout, row)).encode()).hexdigest()[:32]


def _with_ids(record: Record, calls: Mapping[str, Call]) -> list[dict[str, Any]]:
    return [call | {"ids": calls[call["key"]].ids} for call in record["calls"]]


def _take(episode: AgentEpisode, outcome: Outcome) -> None:
    """Add what an agent returned to what it posted; after a final post it can add nothing."""
    if outcome.posted is not None and not episode.is_over:
        episode.post(replace(outcome.posted, final=True))


def _record_of(episode: AgentEpisode, outcome: Outcome) -> Record:
    trained, failure = sorted(episode.trained()), _failure(episode, outcome)
    branches = max(0, len(rows(episode.calls(), frozenset(trained))) - 1)
    return {
        "calls": written_calls(episode.calls()),
        "trained": trained,
        "reward": None if failure else episode.reward,
        "info": episode.info,
        "failure": " ".join(failure.split())[:FAILURE_CHARS],
        "counts": episode.counts | {"branches": branches},
    }


def _failure(episode: AgentEpisode, outcome: Outcome) -> str:
    """Sort and reason; empty if the episode has a reward to train on."""
    reasons: list[tuple[bool, Callable[[], str]]] = [
        (episode.broken is not None, lambda: f"broke: {episode.broken}"),
        (episode.unusable is not None, lambda: f"unusable: {episode.unusable}"),
        (not episode.trained(), lambda: "broke: the agent made no call to train on"),
        (episode.reward is not None and episode.is_over, lambda: ""),
        (outcome.infrastructure is not None, lambda: f"infrastructure: {outcome.infrastructure}"),
        (outcome.broken is not None, lambda: f"broke: {outcome.broken}"),
    ]
    return next((reason() for holds, reason in reasons if holds), "broke: the agent ended without a reward")
