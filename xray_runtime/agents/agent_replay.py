"""Records of agents' episodes that a replay takes from a ledger: their calls are sampled again, without the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from xray_runtime.agents.agent_records import EpisodeKey, Played, Record, journal_entry, journal_key, read_calls
from xray_runtime.agents.segments import PolicyCall
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling


def record_line(rollout: str, row: int, step: int, record: Record) -> dict[str, Any]:
    """A line of the journal with a record from the ledger."""
    key = journal_key("replay", rollout, row)
    return journal_entry(key, step, replay=[rollout, row], record=record)


class ReplayedEpisodes:
    """Recorded episodes, of which each call in the loss is sampled again by its version of the policy. `generate`:
    (prompts and seeds, sampling, version) → replies."""

    def __init__(
        self,
        generate: Callable[[PromptBatch, Sampling, int], ReplyBatch],
        sampling: Sampling,
        records: Mapping[EpisodeKey, Record],
    ) -> None:
        self._generate, self._sampling, self._records = generate, sampling, records
        self._calls = {key: read_calls(record) for key, record in records.items()}

    def sample_again(self, version: int, places: Iterable[EpisodeKey] | None = None) -> None:
        """Sample the calls of a version, which the generator holds; None: of all episodes."""
        samplings: dict[Sampling, list[tuple[EpisodeKey, PolicyCall]]] = {}
        for key_of_episode in self._calls if places is None else places:
            for call in self._calls.get(key_of_episode, {}).values():
                if call.is_trained and call.version == version:
                    samplings.setdefault(replace(self._sampling, **call.options), []).append((key_of_episode, call))
        for sampling, batch in samplings.items():
            seeds = np.array([call.seed for _, call in batch])
            prompts = PromptBatch(input_ids=Ragged.of(call.prompt for _, call in batch), seed=seeds)
            answer = self._generate(prompts, sampling, version)
            replies = zip(answer.response_ids, answer.rollout_logprobs, strict=True)
            for (key_of_episode, call), (ids, logprobs) in zip(batch, replies, strict=True):
                self._calls[key_of_episode][call.key] = replace(call, ids=ids.tolist(), logprobs=logprobs.tolist())

    def played(self, key: EpisodeKey) -> Played | None:
        """The episode at a place; None if it is not recorded."""
        if key not in self._records:
            return None
        record, calls = self._records[key], self._calls[key]
        written = [call | {"ids": calls[call["key"]].ids} for call in record["calls"]]
        return Played(record | {"calls": written}, list(calls.values()))
