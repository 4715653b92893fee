"""Records of agents' episodes that a replay takes from a ledger: their calls are sampled again, without the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from xray_runtime.agents.agent_records import EpisodeKey, Played, Record, journal_entry, journal_key, read_calls
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.engines.sampling import Sampling
from xray_runtime.methods.common.sampling.reply_stream import RecordedReply, in_parts, sample_again


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
        in_flight: bool,
    ) -> None:
        self._generate, self._records = generate, records
        self._calls = {key: read_calls(record) for key, record in records.items()}
        self._replies: dict[EpisodeKey, dict[str, RecordedReply]] = {}
        """Those in the loss, by the keys of their calls."""
        for key, calls in self._calls.items():
            self._replies[key] = {}
            for call in calls.values():
                if call.is_trained:
                    options = replace(sampling, **call.options)
                    options = in_parts(options) if in_flight else options
                    given = call.prompt, call.seed, options, call.ids, call.logprobs, call.versions
                    self._replies[key][call.key] = RecordedReply(*given)

    def sample_again(self, version: int, places: Iterable[EpisodeKey] | None = None) -> None:
        """Sample the calls of a version, which the generator holds; None: of all episodes."""
        found = (self._replies.get(key, {}) for key in (self._replies if places is None else places))
        sample_again((reply for replies in found for reply in replies.values()), version, self._generate)

    def played(self, key: EpisodeKey) -> Played | None:
        """The episode at a place; None if it is not recorded."""
        if key not in self._records:
            return None
        record, again = self._records[key], self._replies[key]
        calls = {
            name: replace(call, ids=again[name].ids, logprobs=again[name].logprobs) if name in again else call
            for name, call in self._calls[key].items()
        }
        written = [call | {"ids": calls[call["key"]].ids} for call in record["calls"]]
        return Played(record | {"calls": written}, list(calls.values()))
