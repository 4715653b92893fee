"""Answers of environments from a ledger: asked again in a replay, they might differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.agents.episodes.agent_episodes import batch_line
from xray_runtime.agents.episodes.agent_records import read_episodes
from xray_runtime.agents.episodes.agent_replay import record_line
from xray_runtime.agents.episodes.episodes import answer_key
from xray_runtime.agents.episodes.in_flight import GROUP
from xray_runtime.data.ledger import ANSWERS, read_shard, shard_path
from xray_runtime.data.tokenizing import turns
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import EPISODES
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.methods.common.environment import AgentConfig
from xray_runtime.methods.common.sampling.episode import rollout_name
from xray_runtime.methods.ppo.rollouts import purpose_of
from xray_runtime.rewards.journal import Journal
from xray_runtime.rewards.reward_sources import ENVIRONMENT

if TYPE_CHECKING:
    import pyarrow as pa

    from xray_runtime.methods.ppo.config import PPOConfig


PLACE = ("row", "round", "version")
"""Columns of an episode's place in the run."""


def restore_environment(checkpoint: Path, config: PPOConfig, iteration: int, journal: Journal) -> list[str]:
    """Write the answers of the environment to `journal`, as an earlier attempt would, up to `iteration` where the
    ledger has them; returns their source. Raises ConfigError if a shard is damaged."""
    from xray_runtime.models.causal_lm import load_tokenizer

    if config.environment is None:
        return []
    taken, tokenizer = False, load_tokenizer(checkpoint)
    is_agent = isinstance(config.environment, AgentConfig)
    for number in range(iteration + 1):
        path = shard_path(checkpoint / LEDGER, number)
        if not path.exists():
            continue
        try:
            table = read_shard(path).table.sort_by("row")
        except ValueError as error:
            raise ConfigError(f"REF: {error}") from None
        if ANSWERS in table.column_names:
            taken = True
            lines = _of_agent(table, number, config) if is_agent else _of_environment(table, number, config, tokenizer)
            journal.write_entries(number, lines)
    return [ENVIRONMENT] if taken else []


def restore_episodes(checkpoint: Path, journal: Journal) -> list[str]:
    """Write the records of agents' episodes that no ledger has to `journal`; returns their source.

    Raises ConfigError where the file is damaged.
    """
    try:
        records = read_episodes(checkpoint / EPISODES)
    except ValueError as error:
        raise ConfigError(f"REF: {error}") from None
    lines = [record_line(*place, 0, record) for place, record in records.items()]
    journal.write_entries(0, lines)
    return [ENVIRONMENT] if lines else []


def _of_agent(table: pa.Table, number: int, config: PPOConfig) -> list[dict[str, Any]]:
    """Lines of the journal with the records of an iteration's episodes, and with which they are (`in_flight`)."""
    lines = []
    for row, attempt, version, text in zip(*(table[n].to_pylist() for n in (*PLACE, ANSWERS)), strict=True):
        record, place = json.loads(text), row - attempt * config.rollout_size
        if GROUP in record:
            rollout, place = rollout_name(purpose_of(0), record[GROUP], None), row % config.samples_per_prompt
        else:
            rollout = rollout_name(purpose_of(attempt), number, version)
        lines.append(record_line(rollout, place, number, record))
    groups = dict.fromkeys(line["record"][GROUP] for line in lines if GROUP in line["record"])
    return [*lines, *([batch_line(number, list(groups))] if groups else [])]


def _of_environment(table: pa.Table, number: int, config: PPOConfig, tokenizer: Any) -> list[dict[str, Any]]:
    """Lines of the journal for the episodes of an iteration."""
    columns = (*PLACE, "reply_ids", "response_mask", ANSWERS)
    lines = []
    for row, attempt, version, ids, mask, answers in zip(*(table[n].to_pylist() for n in columns), strict=True):
        rollout = rollout_name(purpose_of(attempt), number, version)
        replies = [text for own, text in turns(tokenizer, np.array(ids), np.array(mask)) if own]
        for turn, answer in enumerate(json.loads(answers)):  # the first answers the reset
            key = answer_key(rollout, row - attempt * config.rollout_size, replies[:turn])
            lines.append({"key": key, "source": ENVIRONMENT, "step": number, **answer})
    return lines
