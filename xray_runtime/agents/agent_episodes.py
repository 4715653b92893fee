"""Rollouts of agents: each episode runs an agent once, which calls the policy through the gateway.

A rollout's bytes do not depend on how long agents take or in which order they call: a call's seed derives from its
place in its episode (`agents.segments`), and replies do not depend on their batch. Each call is journaled before it is
answered, and each result before it is used. After a kill, episodes that ended are read from the journal; the others run
again and are answered from it. A record in the journal, which a replay takes from the ledger, is sampled again without
its agent.

With `in_flight_updates` an episode may have tokens of several versions of the policy (`methods.ppo.in_flight`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from xray_runtime.agents.agent_records import (
    AGENT,
    Planned,
    Played,
    agent_metrics,
    journal_entry,
    read_episodes,
    record_of,
    rollout_of_records,
    write_episodes,
)
from xray_runtime.agents.agent_replay import ReplayedEpisodes
from xray_runtime.agents.episode import AgentEpisode, EpisodeLimits, Policy, call_from_json
from xray_runtime.agents.gateway import Gateway
from xray_runtime.agents.outcomes import Outcome
from xray_runtime.agents.pictures import RequestPictures
from xray_runtime.agents.runner import Address, Runner, open_runner
from xray_runtime.agents.segments import PolicyCall
from xray_runtime.cluster.pictures import picture_folders
from xray_runtime.cluster.protocols import get
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Rollout
from xray_runtime.data.chat_format import chat_format
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.graph.artifacts import EPISODES
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.sampling.episode import EpisodeBatch
from xray_runtime.methods.common.training.finite import check_rollout
from xray_runtime.rewards.journal import Journal

if TYPE_CHECKING:
    from xray_runtime.methods.common.environment import AgentConfig
    from xray_runtime.methods.common.sampling.episode_source import SamplerSetup

log = logging.getLogger(__name__)

LOG = "agents.log"
"""Output of the agents."""
POLL_S = 0.5
"""Seconds between checks, while an agent runs, whether the generator failed."""
ANEW = ("begun_anew", "stale")
"""Counts of why an episode began anew: other calls than the journal's; calls of too old a version."""


class AgentEpisodes:
    """Samples the rollouts of one stage whose environment is an agent."""

    def __init__(self, setup: SamplerSetup) -> None:
        self._stage = stage = setup.stage
        self._generator, self._sampling, self._log_path = setup.generator, setup.sampling, setup.log_dir / LOG
        self._config: AgentConfig = stage.config.environment
        self._tokenizer, self._format = setup.tokenizer, chat_format(setup.tokenizer)
        folders = picture_folders(stage.inputs)
        self._pictures = RequestPictures(folders) if folders else None
        config, context = self._config, setup.max_prompt + self._config.max_tokens
        leaves_out = config.untrainable == "leave_out"
        self._limits = EpisodeLimits(config.max_calls, config.max_sampled_tokens, context, leaves_out)
        self.journal = Journal(stage.kept, stage.kept_shared, stage.seal)
        self._known: dict[str, dict[str, PolicyCall]] = {}
        """Episode in a rollout → calls of an earlier attempt."""
        for entry in self.journal.entries(AGENT):
            if "call" in entry:
                call = call_from_json(entry["call"])
                self._known.setdefault(entry["episode"], {})[call.key] = call
        self._records_path = setup.out / EPISODES
        self._records = read_episodes(self._records_path)
        # A resumed attempt does not play all episodes of the earlier one again.
        self._records |= {tuple(e["kept"]): e["record"] for e in self.journal.entries(AGENT) if "kept" in e}
        replays = [entry for entry in self.journal.entries(AGENT) if "replay" in entry]
        self._replays = ReplayedEpisodes(self._generate, self._sampling, replays)
        self._in_flight = bool(getattr(stage.config, "in_flight_updates", False))
        self._gateway = Gateway(self._generate, config.host)
        self._runner: Runner | None = None
        self._lock, self._is_closed = threading.Lock(), False
        self._dropped: set[tuple[str, int]] = set()
        # One rollout at a time: episodes of two would have the same names.
        self._rollouts = ThreadPoolExecutor(1)
        self._threads = ThreadPoolExecutor(config.concurrency)
        """For episodes in flight."""

    def sample(self, batch: EpisodeBatch) -> Rollout:
        """Run an agent for each prompt of a batch."""
        assert batch.version is not None
        planned = self.planned(batch)
        self._replays.sample_again(batch.version, [(episode.rollout, episode.row) for episode in planned])
        with ThreadPoolExecutor(min(self._config.concurrency, len(planned))) as threads:
            played = list(threads.map(partial(self._play, batch.version, batch.number), planned))
        if batch.keep:
            self._records |= {(e.rollout, e.row): of.record for e, of in zip(planned, played, strict=True)}
        return self.rollout(planned, played, batch.version)

    def planned(self, batch: EpisodeBatch) -> list[Planned]:
        return [
            Planned(
                f"{batch.purpose}-{batch.number}-{row}", batch.name, row, {"seed": seed} | task, seed, ids, batch.keep
            )
            for row, task, seed, ids in batch.starts(self._stage)
        ]

    def rollout(self, planned: Sequence[Planned], played: Sequence[Played], version: int) -> Rollout:
        rollout = rollout_of_records(planned, played, self._format.end_of_turn, version)
        return rollout if self._in_flight else rollout.with_columns(token_versions=None)

    def begin(self, batch: EpisodeBatch) -> Future[Rollout]:
        """Call `sample` in another thread, after earlier calls of `begin`."""
        return self._rollouts.submit(self.sample, batch)

    def start(self, planned: Planned, step: int, stale: Played | None = None) -> Future[Played]:
        """Play an episode in another thread, each call with the version of the policy that is then current; `stale` is
        the episode before, with a call of too old a version."""
        if stale is None:
            return self._threads.submit(self._play, None, step, planned)
        counts = Counter({name: stale.record["counts"][name] for name in ANEW})
        self._begin_anew(planned, step, counts, "stale")
        return self._threads.submit(self._play, None, step, planned, counts)

    @contextmanager
    def updating(self, version: int, oldest: int) -> Iterator[None]:
        """As `Gateway.updating`; episodes that ended as stale begin anew."""
        with self._gateway.updating(version, oldest):
            yield

    def drop(self, planned: Planned, reply: Future[Played]) -> None:
        reply.cancel()
        self._dropped.add((planned.rollout, planned.row))

    def take_stale(self) -> int:
        """Calls that began anew; episodes that did are counted in their records."""
        return self._gateway.sampler.take_stale()

    def metrics(self, episodes: Rollout) -> dict[str, float]:
        """Counts of the episodes, and the share of the time since the last call in which the generator sampled for no
        agent."""
        return agent_metrics(episodes) | {"speed/generator_idle": self._gateway.sampler.take_idle()}

    def close(self) -> None:
        """End all agents and stop answering."""
        with self._lock:
            self._is_closed = True
            if self._runner is not None:
                self._runner.close()
        for threads in (self._rollouts, self._threads):
            threads.shutdown(cancel_futures=True)
        self._gateway.close()
        if self._records:
            write_episodes(self._records_path, self._records)

    def _generate(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        answer = get(self._generator.generate.remote(rows, sampling, version))
        check_rollout(answer, len(rows), sampling)
        return answer

    def _open_runner(self) -> Runner:
        # Late, because a replay needs no agent.
        with self._lock:
            if self._runner is None:
                self._runner = open_runner(self._config, self._log_path)
            return self._runner

    def _play(self, version: int | None, step: int, planned: Planned, anew: Counter[str] | None = None) -> Played:
        """Run the agent of one episode until it has a result, or fails. `anew` counts how often it began anew, by
        `ANEW`; None: as journaled."""
        replayed = self._replays.played((planned.rollout, planned.row))
        if replayed is not None:
            return replayed
        counts, ran_again = self._begun_anew(planned) if anew is None else anew, 0
        while True:
            attempt = counts.total()
            name = f"{planned.name}-{attempt}" if attempt else planned.name
            known = self._known.get(f"{planned.rollout}/{name}", {})
            end = self.journal.entry(planned.key("end", attempt))
            if end is not None:
                return Played(end["record"], [known[call["key"]] for call in end["record"]["calls"]], end["ran_again"])
            episode, outcome = self._run(planned, name, known, version, step)
            if episode.is_stale:
                log.info("%s starts over: its oldest call is from too old a version", name)
                self._begin_anew(planned, step, counts, "stale")
                continue
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
            self._begin_anew(planned, step, counts, "begun_anew")
        record = record_of(episode, outcome)
        record["counts"] |= {why: counts[why] for why in ANEW}
        kept_as = {"kept": [planned.rollout, planned.row]} if planned.keep else {}
        ended = journal_entry(planned.key("end", attempt), step, record=record, ran_again=ran_again, **kept_as)
        self.journal.write_entries(step, [ended])
        if record["failure"]:
            log.warning("%s: %s", name, record["failure"])
        return Played(record, episode.calls(), ran_again)

    def _begun_anew(self, planned: Planned) -> Counter[str]:
        counts = Counter[str]()
        while (entry := self.journal.entry(planned.key("anew", counts.total()))) is not None:
            counts[entry["why"]] += 1
        return counts

    def _begin_anew(self, planned: Planned, step: int, counts: Counter[str], why: str) -> None:
        """Journal that an episode begins anew, and count it; `counts` are those before."""
        self.journal.write_entries(step, [journal_entry(planned.key("anew", counts.total()), step, why=why)])
        counts[why] += 1

    def _run(
        self, planned: Planned, name: str, known: Mapping[str, PolicyCall], version: int | None, step: int
    ) -> tuple[AgentEpisode, Outcome]:
        changed = threading.Event()
        policy = Policy(
            self._format,
            lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=True)),
            self._gateway.sampler,
            self._sampling,
            version,
            lambda key: derive_seed(self._stage.seed, self._stage.name, AGENT, key),
            partial(self._keep, planned, name, step),
            self._pictures,
        )
        episode = AgentEpisode(name, policy, self._limits, known, changed.set)
        task = self._shown(planned.task)
        self._gateway.open(episode)
        run = self._open_runner().start(task, Address(self._gateway.url(episode), episode.secret))
        run.outcome.add_done_callback(lambda _: changed.set())
        place = planned.rollout, planned.row
        while not changed.wait(POLL_S) and self._gateway.sampler.failure is None and place not in self._dropped:
            pass
        if not run.outcome.done():
            run.stop()
        outcome = run.outcome.result()
        self._gateway.call(partial(_take, episode, outcome))
        self._gateway.forget(episode)
        if self._gateway.sampler.failure is not None:
            raise self._gateway.sampler.failure
        if self._is_closed or place in self._dropped:
            raise RuntimeError(f"{self._stage.name}: {name} was given up")
        return episode, outcome

    def _shown(self, task: dict[str, Any]) -> dict[str, Any]:
        """A task as its agent gets it. Pictures are encoded late: a replay needs none, and a rollout holds many."""
        if self._pictures is None:
            return task
        return task | {"messages": [self._pictures.in_task(message) for message in task["messages"]]}

    def _keep(self, planned: Planned, name: str, step: int, calls: Iterable[PolicyCall]) -> None:
        episode = f"{planned.rollout}/{name}"
        keyed = [(planned.key(name, call.key), asdict(call)) for call in calls]
        entries = [journal_entry(key, step, episode=episode, call=call) for key, call in keyed]
        self.journal.write_entries(step, entries)


def _take(episode: AgentEpisode, outcome: Outcome) -> None:
    """Add what an agent returned to what it posted; after a final post it can add nothing."""
    if outcome.posted is not None and not episode.is_over:
        try:
            episode.post(replace(outcome.posted, final=True))
        except ValueError as error:
            episode.break_off(f"the agent returned no valid result: {error}")
