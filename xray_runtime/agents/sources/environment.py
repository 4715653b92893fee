"""Episodes with an environment that answers turn by turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.agents.environment_episodes import Episodes, answer_key
from xray_runtime.agents.environments.pool import EnvironmentPool
from xray_runtime.agents.environments_in_flight import EnvironmentsInFlight
from xray_runtime.data.ledger import ANSWERS, answered_iterations
from xray_runtime.data.tokenizing import turns
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.methods.common.environment import EnvironmentConfig
from xray_runtime.methods.common.sampling.episode import games_of_rows, purpose_of, rollout_name
from xray_runtime.methods.common.sampling.episode_source import EpisodeSource, SamplerSetup
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.rewards.journal import Journal
from xray_runtime.rewards.reward_sources import ENVIRONMENT

if TYPE_CHECKING:
    import pyarrow as pa

    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.config.section import Section

LOG = "environments.log"
COLUMNS = ("row", "round", "version", "reply_ids", "response_mask", ANSWERS)


class EnvironmentSource(EpisodeSource):
    @contextmanager
    def open(self, setup: SamplerSetup) -> Iterator[Episodes]:
        config, log_path = setup.stage.config.environment, setup.log_dir / LOG
        with ExitStack() as stack:
            pool = EnvironmentPool(config.path, config.num_workers, config.timeout_s, config.memory_mb, log_path)
            in_flight = getattr(setup.stage.config, "in_flight_updates", False)
            episodes = (EnvironmentsInFlight if in_flight else Episodes)(setup, pool)
            stack.callback(episodes.close)
            stack.enter_context(pool)
            yield episodes

    def restore(self, checkpoint: Path, config: Section, last: int, journal: Journal) -> bool:
        from xray_runtime.models.causal_lm import load_tokenizer

        tokenizer = None
        for number, table in answered_iterations(checkpoint / LEDGER, last):
            assert isinstance(config, PPOConfig)  # no other kind of stage has a ledger
            tokenizer = tokenizer or load_tokenizer(checkpoint)
            journal.write_entries(number, list(_lines(table, number, config, tokenizer)))
        return tokenizer is not None


def _lines(table: pa.Table, number: int, config: PPOConfig, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Lines of the journal for the episodes of an iteration."""
    if "seat" in table.column_names:
        yield from _lines_of_games(table, number, config)
        return
    columns = [table[name].to_pylist() for name in COLUMNS]
    groups = table["group"].to_pylist() if config.in_flight_updates else [None] * len(table)
    for row, attempt, version, ids, mask, answers, group in zip(*columns, groups, strict=True):
        rollout = rollout_name(purpose_of(attempt), number, version)
        place = row - attempt * config.rollout_size
        if group is not None:
            rollout, place = rollout_name(purpose_of(0), group, None), row % config.samples_per_prompt
        replies = [text for is_sampled, text in turns(tokenizer, np.array(ids), np.array(mask)) if is_sampled]
        for turn, answer in enumerate(json.loads(answers)):  # the first answers the reset
            key = answer_key(rollout, place, replies[:turn])
            yield {"key": key, "source": ENVIRONMENT, "step": number, **answer}


def _lines_of_games(table: pa.Table, number: int, config: PPOConfig) -> Iterator[dict[str, Any]]:
    """The same of games of several, whose answers tell what each seat said."""
    assert isinstance(config.environment, EnvironmentConfig)
    seats, games = config.environment.policy_seats, config.prompts_per_iteration * config.samples_per_prompt
    of_rows = games_of_rows(games, config.samples_per_prompt, len(seats))
    columns = (table[name].to_pylist() for name in ("row", "round", "seat", "version", ANSWERS))
    for row, attempt, seat, version, answers in zip(*columns, strict=True):
        if seat != seats[0]:  # each seat's row has all
            continue
        found = json.loads(answers)
        replies = [answer.pop("reply") for answer in found[1:]]
        for turn, answer in enumerate(found):
            rollout, game = rollout_name(purpose_of(attempt), number, version), row - attempt * config.rollout_size
            key = answer_key(rollout, of_rows[game], replies[:turn])
            answer.pop("seat", None)
            yield {"key": key, "source": ENVIRONMENT, "step": number, **answer}


SOURCE = EnvironmentSource()
