"""Numbers of a ledger that people look at: how rewards spread over iterations, and the numbers of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from xray_runtime.data.ledger import SCORE
from xray_runtime.data.tokenizing import decode_prompts
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.graph import Node
from xray_runtime.trust.rollouts import policy_tokenizer, read_iteration, require_ledger

Columns = Mapping[str, np.ndarray]
"""Column of a reply → its numbers [R]."""


class TokenMeasure(NamedTuple):
    """A number that each sampled token has."""

    title: str
    meaning: str
    needs: tuple[str, ...]
    of: Callable[..., np.ndarray]
    neutral: float = 0.0
    is_signed: bool = True
    """Whether it has values on both sides of 0."""


MEASURES = {
    "logprob": TokenMeasure(
        "log-probability", "of the token by the policy, nats: far below 0 is a surprise", ("logprobs",), np.array
    ),
    "kl": TokenMeasure(
        "KL to the reference",
        "log-probability minus the reference's, nats: above 0 the policy wants it more than the reference",
        ("logprobs", "ref_logprobs"),
        np.subtract,
    ),
    "entropy": TokenMeasure(
        "entropy",
        "of the policy's distribution where the token was drawn, nats: 0 where nothing else could come",
        ("entropy",),
        np.array,
        is_signed=False,
    ),
    "advantage": TokenMeasure(
        "advantage", "above 0 the update makes the token likelier, below 0 rarer", ("advantages",), np.array
    ),
    "weight": TokenMeasure(
        "importance weight",
        "of the token in the loss, for the difference between generator and trainer; 0: left out",
        ("weights",),
        np.array,
        1.0,
        is_signed=False,
    ),
    "mismatch": TokenMeasure(
        "trainer minus generator",
        "log-probability by the trainer minus the generator's, nats: both compute one policy, so about 0",
        ("logprobs", "rollout_logprobs"),
        np.subtract,
    ),
}
LEVELS = 4
"""Shades on each side of the neutral value."""
SURPRISE = 1.5
"""Nats of surprise a shade."""
LIST_COLUMNS = sorted({name for measure in MEASURES.values() for name in measure.needs})
CONTEXT = 6
"""Tokens shown on each side of a listed one."""


@dataclass(frozen=True)
class ReplyToken:
    """A token of a reply."""

    text: str
    sampled: bool
    """Whether the policy sampled it; tokens of an environment are given."""
    numbers: Mapping[str, float]
    """Measure → value; without those that the ledger lacks."""
    level: int
    """Shade by the chosen measure, from -`LEVELS` to `LEVELS`."""


@dataclass(frozen=True)
class TokenReply:
    """A reply, token by token."""

    iteration: int
    row: int
    round: int
    prompt: str
    reward: float | None
    times_trained: int
    tokens: list[ReplyToken]


def checked_measure(name: str) -> str:
    """Raises ConfigError for anything but a name in `MEASURES`."""
    if name not in MEASURES:
        raise ConfigError(f"by: {name!r} is not allowed: must be one of {', '.join(MEASURES)}")
    return name


def reply_tokens(node: Node, iteration: int, row: int, round: int, by: str) -> TokenReply:
    """The tokens of a reply, shaded by a measure. Raises ConfigError without the row, or if tokens are hashed."""
    table = _tokens_of(node, iteration)
    ids = zip(table["row"].to_pylist(), table["round"].to_pylist(), strict=True)
    index = next((n for n, each in enumerate(ids) if each == (row, round)), None)
    if index is None:
        raise ConfigError(f"row: {row} is not allowed: iteration {iteration} has no such row in round {round}")
    scale, one = _scale(table, checked_measure(by)), table.slice(index, 1)
    [record] = one.select(["reward", "times_trained"]).to_pylist()
    tokenizer, numbers = policy_tokenizer(node.directory), _numbers(one, 0)
    [reply_ids] = one["reply_ids"].to_pylist()
    mask = one["response_mask"][0].as_py() if "response_mask" in one.column_names else [True] * len(reply_ids)
    tokens = []
    for n, (token, sampled) in enumerate(zip(reply_ids, mask, strict=True)):
        values_of_token = {name: float(values[n]) for name, values in numbers.items() if n < len(values)}
        level = _level(by, values_of_token.get(by, np.nan), scale) if sampled else 0
        tokens.append(ReplyToken(tokenizer.decode([token]), sampled, values_of_token, level))
    [prompt] = decode_prompts(tokenizer, one["prompt_ids"].to_pylist())
    return TokenReply(iteration, row, round, prompt, record["reward"], record["times_trained"], tokens)


def extreme_tokens(node: Node, iteration: int, by: str, limit: int) -> list[dict[str, Any]]:
    """The sampled tokens farthest from the measure's neutral value (of log-probabilities: the least likely): `row`,
    `round`, `place` in the reply, `before`, `token`, `after` and the numbers. Raises ConfigError as `reply_tokens`."""
    table, found = _tokens_of(node, iteration), list[tuple[float, int, int]]()
    for reply in range(len(table)):
        values = _numbers(table, reply).get(checked_measure(by), np.array([]))
        if "response_mask" in table.column_names:
            values = np.where(table["response_mask"][reply].as_py()[: len(values)], values, np.nan)
        far = -values if by == "logprob" else abs(values - MEASURES[by].neutral)
        places = np.flatnonzero(np.isfinite(far))
        found += [(float(far[n]), reply, int(n)) for n in places[np.argsort(-far[places], kind="stable")][:limit]]
    tokenizer, listed = policy_tokenizer(node.directory), []
    for _, reply, n in sorted(found, key=lambda each: (-each[0], each[1:]))[:limit]:
        ids = table["reply_ids"][reply].as_py()
        listed.append(
            {
                "row": table["row"][reply].as_py(),
                "round": table["round"][reply].as_py(),
                "place": n,
                "before": tokenizer.decode(ids[max(0, n - CONTEXT) : n]),
                "token": tokenizer.decode([ids[n]]),
                "after": tokenizer.decode(ids[n + 1 : n + 1 + CONTEXT]),
                "numbers": {name: float(v[n]) for name, v in _numbers(table, reply).items() if n < len(v)},
            }
        )
    return listed


def _tokens_of(node: Node, iteration: int) -> pa.Table:
    require_ledger(node, iteration)
    table = read_iteration(node, iteration).table
    if "reply_ids" not in table.column_names:
        raise ConfigError(
            f"REF: {node.name} is not allowed: its ledger has hashed tokens, and no numbers of single ones"
        )
    return table


def _numbers(table: pa.Table, reply: int) -> dict[str, np.ndarray]:
    """Measure → its values for the tokens of a reply; empty arrays where the reply was dropped."""
    columns = {n: np.array(table[n][reply].as_py() or [], float) for n in LIST_COLUMNS if n in table.column_names}
    values = {}
    for name, measure in MEASURES.items():
        needed = [columns.get(each, np.array([])) for each in measure.needs]
        if all(len(each) for each in needed) and len({len(each) for each in needed}) == 1:
            values[name] = measure.of(*needed)
    return values


def _scale(table: pa.Table, by: str) -> float:
    """The distance from the neutral value that has the darkest shade: of an iteration, so that its replies compare."""
    values = [_numbers(table, reply).get(by, np.array([])) for reply in range(len(table))]
    distances = abs(np.concatenate([*values, np.array([])]) - MEASURES[by].neutral)
    finite = distances[np.isfinite(distances)]
    return float(np.quantile(finite, 0.98)) if len(finite) else 0.0


def _level(by: str, value: float, scale: float) -> int:
    if not np.isfinite(value):
        return 0
    if by == "logprob":
        return -min(LEVELS, int(max(0.0, -value) / SURPRISE))
    share = (value - MEASURES[by].neutral) / scale if scale else 0.0
    return round(LEVELS * max(-1.0, min(1.0, share)))


@dataclass(frozen=True)
class RewardSpread:
    """How the rewards of a ledger spread: a histogram for each column of iterations."""

    columns: list[tuple[int, int]]
    """First and last iteration of each column."""
    edges: list[float]
    """The bins' bounds, ascending."""
    counts: list[list[int]]
    """[column][bin]"""
    means: list[float]
    """Mean reward of each column; NaN without one."""


def reward_spread(node: Node, source: str | None, num_bins: int, most_columns: int) -> RewardSpread | None:
    """The spread of rewards, or of a source's scores; None without any. Raises ConfigError without a ledger."""
    kept = require_ledger(node)
    width = -(-len(kept) // most_columns)
    groups, name = [kept[n : n + width] for n in range(0, len(kept), width)], SCORE + source if source else "reward"
    values = []
    for group in groups:
        tables = (read_iteration(node, number, lists=False).table for number in group)
        found = [v for table in tables if name in table.column_names for v in table[name].to_pylist()]
        numbers = np.array([np.nan if value is None else value for value in found], float)
        values.append(numbers[np.isfinite(numbers)])
    every = np.concatenate(values)
    if not len(every):
        return None
    low, high = float(every.min()), float(every.max())
    edges = np.linspace(low, high if high > low else low + 1.0, num_bins + 1)
    counts = [np.histogram(numbers, edges)[0].tolist() for numbers in values]
    means = [float(numbers.mean()) if len(numbers) else float("nan") for numbers in values]
    return RewardSpread([(group[0], group[-1]) for group in groups], edges.tolist(), counts, means)
