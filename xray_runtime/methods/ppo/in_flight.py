"""Rollouts that run on while the weights change (`in_flight_updates`): single replies, environments and agents alike.

(lag + 1) × `prompts_per_iteration` groups are under way or waiting to be trained on; a group is the replies or episodes
of one prompt. Iteration i:

    sync       requests are held while the weights become version i; unfinished replies go on with it
               what has a token of a version before i − lag begins anew
    request    further groups begin
    take       wait until enough groups are complete, and train on those that began first

So an iteration waits for no slow reply, and no token is more than `lag` updates old when the policy trains on it. Every
prompt is trained on once: the last iterations begin no others and wait for those that are left. With `oversample` a
share more groups are under way, and each iteration drops as many incomplete ones, those that run longest.

Time decides which groups an iteration trains on and which version samples a token. Both are journaled before they are
used, and both are in the ledger. A run that was killed repeats the recorded iterations with the recorded groups, and
keeps all that had ended; what was not recorded is free. A replay follows the ledger in the same way. Two undisturbed
runs differ in their schedule, and so in their bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from xray_runtime.data.batch import Rollout
from xray_runtime.data.ledger import iterations, read_shard, shard_path
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.methods.common.environment import AgentConfig
from xray_runtime.methods.common.sampling.episode import EpisodeBatch, purpose_of
from xray_runtime.methods.common.sampling.in_flight_source import InFlightSource, Versioned
from xray_runtime.methods.common.sampling.journaled_turns import ledger_lines

if TYPE_CHECKING:
    from pathlib import Path

    from xray_runtime.data.batching import Cursor
    from xray_runtime.methods.common.training.prompts import UniquePrompts
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.rewards.journal import Journal

P = TypeVar("P")
Q = TypeVar("Q", bound=Versioned)

SOURCE = "in flight"
"""The journal's source of the groups that iterations train on."""


@dataclass
class GroupsInFlight:
    """The groups that were begun and not trained on."""

    num_begun: int = 0
    prompts: dict[str, int] = field(default_factory=dict)
    """Number of a group, as text for a snapshot's JSON → its prompt."""


@dataclass
class _Group(Generic[P, Q]):
    planned: list[P]
    replies: list[Future[Q]]

    @property
    def is_complete(self) -> bool:
        return all(reply.done() for reply in self.replies)


class InFlight(Generic[P, Q]):
    """The rollouts of a stage with `in_flight_updates`."""

    def __init__(self, source: InFlightSource[P, Q], config: PPOConfig, prompts: UniquePrompts) -> None:
        self._source, self._config, self._prompts = source, config, prompts
        self.state = GroupsInFlight()
        self._groups: dict[int, _Group[P, Q]] = {}
        """Those whose replies are under way or have ended."""
        self._extra = math.ceil(config.oversample * config.prompts_per_iteration)
        self._iteration = 0
        self.dropped: list[int] = []
        """Numbers of the groups that the last iteration dropped."""
        self._num_stale = self._num_dropped = 0

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Hold requests while the generator's weights become those of `version`."""
        with self._source.updating(version, version - self._config.lag):
            yield

    def request(self, iteration: int, cursor: Cursor) -> None:
        """Begin groups until those of all iterations up to `iteration + lag` are under way."""
        self._iteration, config = iteration, self._config
        iterations = min(config.lag + 1, config.iterations - iteration)
        missing = iterations * config.prompts_per_iteration + self._extra - len(self.state.prompts)
        for prompt in cursor.take(max(0, missing)):
            self.state.prompts[str(self.state.num_begun)] = prompt
            self.state.num_begun += 1
        if self._source.journal.entry(_key(iteration)) is None:
            self._start([int(number) for number in self.state.prompts])

    def take(self) -> Rollout:
        """The replies of the requested iteration, with the groups as journaled if they are."""
        line = self._source.journal.entry(_key(self._iteration))
        if line is None:
            chosen = self._first_complete()
            line = batch_line(self._iteration, chosen, self._slowest(chosen))
            self._source.journal.write_entries(self._iteration, [line])
        chosen, self.dropped = line["groups"], line["dropped"]
        self._start(chosen)
        planned, played = list[P](), list[Q]()
        for number in chosen:
            group = self._groups.pop(number)
            planned += group.planned
            played += [reply.result() for reply in group.replies]
        numbers = np.repeat(np.array(chosen), self._config.samples_per_prompt)
        prompts = np.array([self.state.prompts.pop(str(number)) for number in chosen])
        self._drop(self.dropped)
        rollout = self._source.rollout(planned, played, self._iteration)
        prompts = np.repeat(prompts, self._config.samples_per_prompt)
        return rollout.with_columns(prompt=prompts, group=numbers)

    def metrics(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """Counts since the last call, the oldest token's lag, and the source's metrics."""
        stale, dropped = self._num_stale + self._source.take_stale(), self._num_dropped
        self._num_stale = self._num_dropped = 0
        lag = float(iteration - rollout.version.min())
        counts = {"rollout/max_lag": lag, "rollout/stale": float(stale), "rollout/dropped_groups": float(dropped)}
        return counts | self._source.metrics(rollout)

    def _start(self, numbers: Sequence[int]) -> None:
        size = self._config.samples_per_prompt
        for number in numbers:
            if number not in self._groups:
                copies = [self.state.prompts[str(number)]] * size
                contents, columns = [self._prompts[i] for i in copies], self._prompts.columns(copies)
                planned = self._source.planned(EpisodeBatch(contents, columns, None, purpose_of(0), number, size))
                self._groups[number] = _Group(planned, [self._source.start(p, self._iteration) for p in planned])

    def _first_complete(self) -> list[int]:
        """The complete groups that began first, as many as an iteration trains on."""
        oldest = self._iteration - self._config.lag
        while True:
            for group in self._groups.values():
                for place, (planned, reply) in enumerate(zip(group.planned, group.replies, strict=True)):
                    # A failure of a stage raises here, whichever group it is in.
                    if reply.done() and reply.result().version(oldest) < oldest:
                        group.replies[place] = self._source.start(planned, self._iteration, reply.result())
                        self._num_stale += 1
            complete = [number for number, group in sorted(self._groups.items()) if group.is_complete]
            if len(complete) >= self._config.prompts_per_iteration:
                return complete[: self._config.prompts_per_iteration]
            running = [each for group in self._groups.values() for each in group.replies if not each.done()]
            wait(running, return_when=FIRST_COMPLETED)

    def _slowest(self, chosen: Sequence[int]) -> list[int]:
        """The incomplete groups that began first, as many as were begun in excess; after the last iteration all."""
        others = [number for number in sorted(self._groups) if number not in chosen]
        if self._iteration + 1 == self._config.iterations:
            return others
        return [number for number in others if not self._groups[number].is_complete][: self._extra]

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.state.prompts.pop(str(number))
            if number in self._groups:
                group = self._groups.pop(number)
                for planned, reply in zip(group.planned, group.replies, strict=True):
                    self._source.drop(planned, reply)
        self._num_dropped += len(numbers)


def _key(iteration: int) -> str:
    return hashlib.sha256(f"{SOURCE} {iteration}".encode()).hexdigest()[:32]


def restore_groups(checkpoint: Path, config: Any, last: int, journal: Journal) -> None:
    """Write the schedule of a checkpoint's ledger to `journal`, and what was sampled by it, as an earlier attempt
    would, up to iteration `last`; nothing without `in_flight_updates`. Raises ValueError if a shard is damaged."""
    if not getattr(config, "in_flight_updates", False):
        return
    for number in (number for number in iterations(checkpoint / LEDGER) if number <= last):
        shard = read_shard(shard_path(checkpoint / LEDGER, number))
        table = shard.table.sort_by("row")
        groups = list(dict.fromkeys(table["group"].to_pylist()))
        lines = [batch_line(number, groups, shard.dropped)]
        if not isinstance(config.environment, AgentConfig):  # whose calls are in their records
            lines += ledger_lines(number, table, config.samples_per_prompt)
        journal.write_entries(number, lines)


def batch_line(iteration: int, groups: Sequence[int], dropped: Sequence[int]) -> dict[str, Any]:
    """A line of the journal: the groups that an iteration trains on, and those that it drops."""
    given = {"groups": list(groups), "dropped": list(dropped)}
    return {"key": _key(iteration), "source": SOURCE, "step": iteration, **given}
