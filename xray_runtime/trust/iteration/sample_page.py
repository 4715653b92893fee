"""The page of one reply: prompt, tokens, rewards, advantages, log-probabilities, losses and gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from xray_runtime.data.ledger import FAILURE, SCORE, sources_of
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.report.rendering import template
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.rewards.reward_sources import ENVIRONMENT
from xray_runtime.rewards.term import source_names
from xray_runtime.trust.iteration.sample import SampleStep
from xray_runtime.trust.rollout_tokens import reply_tokens
from xray_runtime.trust.rollouts import read_iteration

COLUMNS = {
    "rollout_logprobs": "by the sampler",
    "logprobs": "by the policy",
    "ref_logprobs": "by the reference",
    "advantages": "advantage",
    "weights": "importance weight",
}
"""Column of the ledger with a number a token → its heading."""


def write_page(
    path: Path, node: Node, config: PPOConfig, iteration: int, row: int, steps: Sequence[SampleStep]
) -> None:
    """Write the page of the reply in a row of an iteration's ledger, whose tokens are not hashed."""
    table = read_iteration(node, iteration).table
    one = table.filter(pc.equal(table["row"], row))
    record, columns = one.to_pylist()[0], [name for name in COLUMNS if name in table.column_names]
    reply = reply_tokens(node, iteration, row, record["round"], "advantage")
    tokens = [
        (token.text, token.sampled, [record[name][n] for name in columns]) for n, token in enumerate(reply.tokens)
    ]
    html = template("sample.html").render(
        node=node,
        iteration=iteration,
        reply=reply,
        record=record,
        sources=_sources(config, table, record),
        siblings=_siblings(table, record),
        headings=[COLUMNS[name] for name in columns],
        tokens=tokens,
        steps=[_shown(step) for step in steps],
    )
    path.write_text(html, encoding="utf-8")


def _sources(config: PPOConfig, table: pa.Table, record: dict[str, Any]) -> list[tuple[str, float, Any, str]]:
    """(source, weight, score, why it failed) of each source of reward."""
    weights = dict(zip(source_names(config.rewards), (term.weight for term in config.rewards), strict=True))
    weights[ENVIRONMENT] = 1.0
    return [
        (name, weights.get(name, 1.0), record[SCORE + name], record.get(FAILURE + name) or "")
        for name in sources_of(table)
    ]


def _siblings(table: pa.Table, record: dict[str, Any]) -> list[tuple[int, float | None]]:
    """(row, reward) of the replies to the same prompt that were not replaced."""
    same = table.filter(pc.and_(pc.equal(table["prompt"], record["prompt"]), pc.is_valid(table["scaled_reward"])))
    return list(zip(same["row"].to_pylist(), same["reward"].to_pylist(), strict=True))


def _shown(step: SampleStep) -> dict[str, Any]:
    ratios = [math.exp(new - old) for new, old in zip(step.logprobs, step.old_logprobs, strict=True)]
    return {
        "step": step,
        "losses": list(step.losses),
        "tokens": list(zip(step.logprobs, ratios, *step.losses.values(), strict=True)),
    }
