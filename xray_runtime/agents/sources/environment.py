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
from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.data.ledger import ANSWERS, answered_iterations
from xray_runtime.data.tokenizing import turns
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.methods.common.sampling.episode import purpose_of, rollout_name
from xray_runtime.methods.common.sampling.episode_source import EpisodeSource
from xray_runtime.rewards.journal import Journal
from xray_runtime.rewards.reward_sources import ENVIRONMENT

if TYPE_CHECKING:
    import pyarrow as pa

    from xray_runtime.cluster.stage import Stage
    from xray_runtime.methods.ppo.config import PPOConfig

LOG = "environments.log"
COLUMNS = ("row", "round", "version", "reply_ids", "response_mask", ANSWERS)


class EnvironmentSource(EpisodeSource):
    @contextmanager
    def open(
        self,
        stage: Stage[Any, Any],
        generator: ModelHandle,
        sampling: Sampling,
        tokenizer: Any,
        max_prompt: int,
        log_dir: Path,
        out: Path,
    ) -> Iterator[Episodes]:
        config = stage.config.environment
        with ExitStack() as stack:
            pool = EnvironmentPool(config.path, config.num_workers, config.timeout_s, config.memory_mb, log_dir / LOG)
            episodes = Episodes(generator, stage, sampling, tokenizer, max_prompt, pool)
            stack.callback(episodes.close)
            stack.enter_context(pool)
            yield episodes

    def restore(self, checkpoint: Path, config: PPOConfig, last: int, journal: Journal) -> bool:
        from xray_runtime.models.causal_lm import load_tokenizer

        found = False
        for number, table in answered_iterations(checkpoint / LEDGER, last):
            journal.write_entries(number, list(_lines(table, number, config, load_tokenizer(checkpoint))))
            found = True
        return found


def _lines(table: pa.Table, number: int, config: PPOConfig, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Lines of the journal for the episodes of an iteration."""
    for row, attempt, version, ids, mask, answers in zip(*(table[n].to_pylist() for n in COLUMNS), strict=True):
        rollout = rollout_name(purpose_of(attempt), number, version)
        replies = [text for own, text in turns(tokenizer, np.array(ids), np.array(mask)) if own]
        for turn, answer in enumerate(json.loads(answers)):  # the first answers the reset
            key = answer_key(rollout, row - attempt * config.rollout_size, replies[:turn])
            yield {"key": key, "source": ENVIRONMENT, "step": number, **answer}


SOURCE = EnvironmentSource()
