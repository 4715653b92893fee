"""Records of agents' episodes that a replay takes from a ledger, without the agent.

Calls by one version of the policy are sampled again. Those of episodes in flight are taken as they
were: time decided which of them shared a batch, and the last bit of a log-probability may depend on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from xray_runtime.agents.agent_records import EpisodeKey, Played, Record, journal_entry, journal_key, read_calls
from xray_runtime.agents.segments import PolicyCall, rows
from xray_runtime.data.batch import PromptBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling
from xray_runtime.methods.common.sampling.reply_stream import Generate


def record_line(
    rollout: str, row: int, step: int, record: Record, logprobs: Sequence[float] | None = None
) -> dict[str, Any]:
    """A line of the journal with a record from the ledger; `logprobs`: of the row, if no call is sampled again."""
    known = {} if logprobs is None else {"logprobs": _by_call(record, logprobs)}
    return journal_entry(journal_key("replay", rollout, row), step, replay=[rollout, row], record=record, **known)


def _by_call(record: Record, logprobs: Sequence[float]) -> dict[str, list[float]]:
    """Call in the loss → its log-probabilities, which are among those of its episode's row."""
    # Each call's number goes into the row where its log-probabilities were.
    calls = list(read_calls(record).values())
    numbered = [replace(call, logprobs=[float(n)] * len(call.ids)) for n, call in enumerate(calls)]
    split = rows(numbered, frozenset(record["trained"]))
    in_row = chain(*(zip(row.logprobs, row.sampled, strict=True) for row in split))
    found: dict[str, list[float]] = {key: [] for key in record["trained"]}
    # An episode without calls has one token, which nobody sampled.
    for (number, is_sampled), logprob in zip(in_row, logprobs if split else (), strict=True):
        if is_sampled:
            found[calls[int(number)].key].append(logprob)
    return found


@dataclass
class _Recorded:
    record: Record
    calls: dict[str, PolicyCall]
    sampled_again: list[PolicyCall] = field(default_factory=list)


class ReplayedEpisodes:
    """The episodes of the journal's lines (`record_line`)."""

    def __init__(self, generate: Generate, sampling: Sampling, lines: Iterable[Mapping[str, Any]]) -> None:
        self._generate, self._sampling = generate, sampling
        self._episodes: dict[EpisodeKey, _Recorded] = {}
        for line in lines:
            calls, known = read_calls(line["record"]), line.get("logprobs")
            again = [call for call in calls.values() if call.is_trained] if known is None else []
            calls |= {key: replace(calls[key], logprobs=found) for key, found in (known or {}).items()}
            rollout, row = line["replay"]
            self._episodes[rollout, row] = _Recorded(line["record"], calls, again)

    def sample_again(self, version: int, places: Iterable[EpisodeKey]) -> None:
        """Sample the calls of these episodes by `version`, which the generator holds."""
        batches: dict[Sampling, list[tuple[_Recorded, PolicyCall]]] = {}
        for episode in (self._episodes[place] for place in places if place in self._episodes):
            for call in episode.sampled_again:
                batches.setdefault(replace(self._sampling, **call.options), []).append((episode, call))
        for sampling, batch in batches.items():
            prompts, seeds = Ragged.of(call.prompt for _, call in batch), np.array([call.seed for _, call in batch])
            answer = self._generate(PromptBatch(input_ids=prompts, seed=seeds), sampling, version)
            columns = zip(batch, answer.response_ids, answer.rollout_logprobs, strict=True)
            for (episode, call), ids, logprobs in columns:
                episode.calls[call.key] = replace(call, ids=ids.tolist(), logprobs=logprobs.tolist())

    def played(self, key: EpisodeKey) -> Played | None:
        """The episode at a place; None if it is not recorded."""
        episode = self._episodes.get(key)
        if episode is None:
            return None
        written = [call | {"ids": episode.calls[call["key"]].ids} for call in episode.record["calls"]]
        return Played(episode.record | {"calls": written}, list(episode.calls.values()))
