"""What services and judges answered, out of a ledger: a replay asks nobody again, who may not answer twice alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.config.validation import ConfigError
from xray_runtime.data.ledger import SCORE, read_shard, shard_path, sources_of
from xray_runtime.data.pairs import TRAIN, Example, Pairs
from xray_runtime.data.tokenizing import decode_replies
from xray_runtime.rewards.journal import Journal
from xray_runtime.rewards.source import Batch, Score
from xray_runtime.stages.artifacts import LEDGER

if TYPE_CHECKING:
    from xray_runtime.config.ppo import PPOConfig
    from xray_runtime.stages.inputs import PPOInputs

WHY = "as in the ledger"


def servers(config: PPOConfig) -> list[int]:
    """Which terms of the reward are services and judges."""
    return [n for n, term in enumerate(config.rewards) if term.service is not None or term.judge is not None]


def take_answers(checkpoint: Path, config: PPOConfig, inputs: PPOInputs, iteration: int, directory: Path) -> list[str]:
    """Have what servers answered lie in `directory` as an attempt before would have left it; returns their names.

    Args:
        iteration: up to which the ledger in `checkpoint` has every one, with its tokens.

    Raises:
        ConfigError: a shard is damaged.
    """
    from xray_runtime.models.causal_lm import load_tokenizer

    if not servers(config):
        return []
    journal, taken = Journal(directory), set[str]()
    tokenizer, pairs = load_tokenizer(checkpoint), Pairs(inputs.prompts.path / TRAIN, Example)
    for number in range(iteration + 1):
        try:
            table = read_shard(shard_path(checkpoint / LEDGER, number)).table.sort_by("row")
        except ValueError as error:
            raise ConfigError(f"REF: {error}") from None
        replies = decode_replies(tokenizer, table["reply_ids"].to_pylist())
        messages = [pairs[row].prompt for row in table["prompt"].to_pylist()]
        rounds = table["round"].to_numpy()
        for source in (sources_of(table)[n] for n in servers(config)):
            taken.add(source)
            scores = table[SCORE + source].to_pylist()
            for asked in (np.flatnonzero(rounds == attempt) for attempt in np.unique(rounds)):
                # Rows of one round were scored together, in order.
                batch = Batch([], [replies[i] for i in asked], [messages[i] for i in asked], {}, {"step": number})
                keyed = zip(journal.keys(f"rewards/{source}", batch), asked, strict=True)
                journal.write(source, number, [(k, Score(scores[i], WHY)) for k, i in keyed if scores[i] is not None])
    return sorted(taken)
