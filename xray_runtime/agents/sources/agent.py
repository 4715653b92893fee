"""Episodes of an agent that calls the policy at an address."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.agents.agent_episodes import AgentEpisodes
from xray_runtime.agents.agent_records import agent_examples, read_episodes
from xray_runtime.agents.agent_replay import record_line
from xray_runtime.data.ledger import ANSWERS, answered_iterations
from xray_runtime.data.pairs import Example
from xray_runtime.kernel.graph.artifacts import EPISODES
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.methods.common.sampling.episode import purpose_of, rollout_name
from xray_runtime.methods.common.sampling.episode_source import EpisodeSource, SamplerSetup
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.rewards.journal import Journal

if TYPE_CHECKING:
    import pyarrow as pa

    from xray_runtime.kernel.config.section import Section

COLUMNS, IN_FLIGHT = ("row", "round", "version", ANSWERS), ("group", "rollout_logprobs")


class AgentSource(EpisodeSource):
    def open(self, setup: SamplerSetup) -> closing[AgentEpisodes]:
        return closing(AgentEpisodes(setup))

    def restore(self, checkpoint: Path, config: Section, last: int, journal: Journal) -> bool:
        records = read_episodes(checkpoint / EPISODES)
        lines = [record_line(*key, 0, record) for key, record in records.items()]
        journal.write_entries(0, lines)
        is_any = bool(lines)
        for number, table in answered_iterations(checkpoint / LEDGER, last):
            assert isinstance(config, PPOConfig)  # no other kind of stage has a ledger
            journal.write_entries(number, _lines(table, number, config))
            is_any = True
        return is_any

    def examples(self, record: str, decode: Callable[[list[int]], str], name: str) -> Iterator[Example]:
        return agent_examples(json.loads(record), decode, name)


def _lines(table: pa.Table, number: int, config: PPOConfig) -> list[dict[str, Any]]:
    """Lines of the journal with the records of an iteration's episodes."""
    lines = []
    columns = [table[name].to_pylist() for name in COLUMNS]
    in_flight = [table[name].to_pylist() if config.in_flight_updates else [None] * len(table) for name in IN_FLIGHT]
    for row, attempt, version, text, group, logprobs in zip(*columns, *in_flight, strict=True):
        rollout, place = rollout_name(purpose_of(attempt), number, version), row - attempt * config.rollout_size
        if group is not None:
            rollout, place = rollout_name(purpose_of(0), group, None), row % config.samples_per_prompt
        lines.append(record_line(rollout, place, number, json.loads(text), logprobs))
    return lines


SOURCE = AgentSource()
