"""Episodes of agents that run on while the weights change (`in_flight_updates`).

(lag + 1) × `prompts_per_iteration` groups are under way or waiting to be trained on; a group is the episodes of one
prompt. Iteration i:

    sync       calls are held while the weights become version i; one version answers all of a call
               episodes with a call of a version before i − lag end, and begin anew
    request    further groups begin
    take       wait until enough groups are complete, and train on those that began first

So an iteration waits for no slow agent, and no token is more than `lag` updates old when the policy trains on it. Every
prompt is trained on once: the last iterations begin no others and wait for those that are left.

Time decides which groups an iteration trains on and which version answers a call. Both are journaled before they are
used, and both are in the ledger. A run that was killed repeats the recorded iterations with the recorded groups, before
other agents run again; what was not recorded is free. A replay follows the ledger in the same way. Two undisturbed runs
differ in their schedule, and so in their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.agents.agent_episodes import AgentEpisodes
from xray_runtime.agents.agent_records import Planned, Played
from xray_runtime.data.batch import Rollout
from xray_runtime.methods.common.sampling.episode import EpisodeBatch, purpose_of

if TYPE_CHECKING:
    from xray_runtime.data.batching import Cursor
    from xray_runtime.methods.common.training.prompts import UniquePrompts
    from xray_runtime.methods.ppo.config import PPOConfig

GROUP = "group"
"""In an episode's record in the ledger: the number of its group, in the order in which groups begin."""


@dataclass
class GroupsInFlight:
    """The groups that were begun and not trained on."""

    num_begun: int = 0
    prompts: dict[str, int] = field(default_factory=dict)
    """Number of a group, as text for a snapshot's JSON → its prompt."""


@dataclass
class _Group:
    planned: list[Planned]
    episodes: list[Future[Played]]

    @property
    def is_complete(self) -> bool:
        return all(episode.done() for episode in self.episodes)


class InFlightEpisodes:
    """The rollouts of a stage with `in_flight_updates`."""

    def __init__(self, agents: AgentEpisodes, config: PPOConfig, prompts: UniquePrompts) -> None:
        self._agents, self._config, self._prompts = agents, config, prompts
        self.state = GroupsInFlight()
        self._groups: dict[int, _Group] = {}
        """Those whose episodes run or have ended."""
        self._iteration = 0

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Hold calls while the generator's weights become those of `version`."""
        with self._agents.updating(version, version - self._config.lag):
            yield

    def request(self, iteration: int, cursor: Cursor) -> None:
        """Begin all groups up to those of `iteration + lag`."""
        self._iteration, config = iteration, self._config
        end = min(iteration + config.lag + 1, config.iterations) * config.prompts_per_iteration
        while self.state.num_begun < end:
            for prompt in cursor.take(config.prompts_per_iteration):
                self.state.prompts[str(self.state.num_begun)] = prompt
                self.state.num_begun += 1
        if self._agents.recorded_batch(iteration) is None:
            self._start([int(number) for number in self.state.prompts])

    def take(self) -> Rollout:
        """The episodes of the requested iteration, with the groups as journaled if they are."""
        chosen = self._agents.recorded_batch(self._iteration)
        if chosen is None:
            chosen = self._first_complete()
            self._agents.record_batch(self._iteration, chosen)
        self._start(chosen)
        planned, played, prompts = [], [], []
        for number in chosen:
            group, prompt = self._groups.pop(number), self.state.prompts.pop(str(number))
            planned += group.planned
            for episode in group.episodes:
                found = episode.result()
                played.append(replace(found, record=found.record | {GROUP: number}))
                prompts.append(prompt)
        return self._agents.rollout(planned, played, self._iteration).with_columns(prompt=np.array(prompts))

    def _start(self, numbers: list[int]) -> None:
        size = self._config.samples_per_prompt
        for number in numbers:
            if number not in self._groups:
                copies = [self.state.prompts[str(number)]] * size
                contents, columns = [self._prompts[i] for i in copies], self._prompts.columns(copies)
                planned = self._agents.planned(EpisodeBatch(contents, columns, None, purpose_of(0), number, size))
                self._groups[number] = _Group(planned, [self._agents.start(p, self._iteration) for p in planned])

    def _first_complete(self) -> list[int]:
        """The complete groups that began first, as many as an iteration trains on."""
        oldest = self._iteration - self._config.lag
        while True:
            for group in self._groups.values():
                for place, (planned, episode) in enumerate(zip(group.planned, group.episodes, strict=True)):
                    # A failure of a stage raises here, whichever group it is in.
                    if episode.done() and episode.result().version(oldest) < oldest:
                        group.episodes[place] = self._agents.start(planned, self._iteration, episode.result())
            complete = [number for number, group in sorted(self._groups.items()) if group.is_complete]
            if len(complete) >= self._config.prompts_per_iteration:
                return complete[: self._config.prompts_per_iteration]
            running = [each for group in self._groups.values() for each in group.episodes if not each.done()]
            wait(running, return_when=FIRST_COMPLETED)
