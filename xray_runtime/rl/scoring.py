"""A rollout, and what every model and every source of reward says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xray_runtime.algorithms.groups import tied_groups
from xray_runtime.algorithms.rewards import SourceScores, weighted_sum
from xray_runtime.data.pairs import prompt_text
from xray_runtime.data.rows import Ragged, Rows, join, take
from xray_runtime.data.text_rows import text_rows, with_end_of_turn
from xray_runtime.data.tokenizing import decode_replies, own_text
from xray_runtime.rewards.source import Score, failure
from xray_runtime.training.prompts import UniquePrompts
from xray_runtime.workers.protocols import ModelHandle, get, get_all

if TYPE_CHECKING:
    from xray_runtime.config.ppo import PPOConfig
    from xray_runtime.rl.reward_sources import RewardSources


def own_tokens(sampled: Rows) -> Ragged:
    """What the policy said: of an episode of many turns without what it read in between."""
    ids: Ragged = sampled["response_ids"]
    if "response_mask" not in sampled:
        return ids
    return Ragged.of(row[chosen] for row, chosen in zip(ids, sampled["response_mask"], strict=True))


def own_texts(tokenizer: Any, sampled: Rows) -> list[str]:
    """The same as texts."""
    ids = sampled["response_ids"]
    if "response_mask" not in sampled:
        return decode_replies(tokenizer, [reply.tolist() for reply in ids])
    return [own_text(tokenizer, *row) for row in zip(ids, sampled["response_mask"], strict=True)]


def prompt_tokens(sampled: Rows, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """`prompts`, or what an environment began its episodes with in their place."""
    return list(sampled["prompt_ids"]) if "prompt_ids" in sampled else prompts


def episode_scores(sampled: Rows) -> list[Score] | None:
    """What their environment gave episodes, or why it failed; None where replies are no episodes."""
    if "episode_reward" not in sampled:
        return None
    given = zip(sampled["episode_reward"].tolist(), sampled["failure"].tolist(), strict=True)
    return [failure(why) if why else Score(reward) for reward, why in given]


@dataclass(frozen=True)
class ScoredRollout:
    """Replies with their scores, row by row."""

    prompts: list[int]
    """Which prompt each reply is to."""
    replies: list[str]
    sampled: Rows
    """What `Generation.generate` returns."""
    rows: Rows
    """Prompts and replies in tokens; `id` is a row's own within an iteration."""
    scores: Rows
    """Of policy, reference and critic."""
    sources: SourceScores
    dropped: tuple[ScoredRollout, ...] = ()
    """Rows that others took the place of, by round."""

    def at(self, places: Sequence[int]) -> ScoredRollout:
        """The rows at `places`."""
        index = torch.tensor(places)
        values, applies, apart = self.sources.values, self.sources.applies, self.sources.disagreements
        return ScoredRollout(
            [self.prompts[place] for place in places],
            [self.replies[place] for place in places],
            take(self.sampled, places),
            take(self.rows, places),
            take(self.scores, places),
            SourceScores(
                {name: of[index] for name, of in values.items()},
                {name: of[index] for name, of in applies.items()},
                {name: of[index] for name, of in apart.items()},
                {name: [whys[place] for place in places] for name, whys in self.sources.failures.items()},
            ),
        )

    def replaced(self, places: Sequence[int], by: ScoredRollout) -> ScoredRollout:
        """The same with `by` in the rows at `places`."""
        kept = np.setdiff1d(np.arange(len(self.prompts)), places).tolist()

        def rows(old: Rows, new: Rows) -> Rows:
            return join([take(old, kept), new], [kept, places])

        def column(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return old.index_copy(0, torch.tensor(places), new)

        def listed(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
            given = dict(zip(places, new, strict=True))
            return [given.get(place, value) for place, value in enumerate(old)]

        prompts, replies = listed(self.prompts, by.prompts), listed(self.replies, by.replies)
        values = {name: column(old, by.sources.values[name]) for name, old in self.sources.values.items()}
        applies = {name: column(old, by.sources.applies[name]) for name, old in self.sources.applies.items()}
        apart = {name: column(old, by.sources.disagreements[name]) for name, old in self.sources.disagreements.items()}
        failures = {name: listed(old, by.sources.failures[name]) for name, old in self.sources.failures.items()}
        return ScoredRollout(
            prompts,
            replies,
            rows(self.sampled, by.sampled),
            rows(self.rows, by.rows),
            rows(self.scores, by.scores),
            SourceScores(values, applies, apart, failures),
            (*self.dropped, self.at(places)),
        )

    def tied(self, weights: Mapping[str, float], group_size: int) -> list[int]:
        """The rows of groups, of `group_size` replies to one prompt each, whose rewards as scored are all the same."""
        groups = torch.arange(len(self.prompts)) // group_size
        tied: list[int] = tied_groups(weighted_sum(self.sources, weights), groups)[groups].nonzero()[:, 0].tolist()
        return tied


class Scorer:
    """Scores rollouts with the models of a stage.

    Args:
        stops: tokens that end a reply.
        one_trunk: policy and critic stand on the same frozen trunk, which the policy computes for both.
    """

    def __init__(
        self,
        models: Mapping[str, ModelHandle],
        config: PPOConfig,
        rewards: RewardSources,
        tokenizer: Any,
        stops: tuple[int, ...],
        prompts: UniquePrompts,
        one_trunk: bool = False,
    ) -> None:
        self._models, self._config, self._rewards, self._one_trunk = models, config, rewards, one_trunk
        self._tokenizer, self._stops, self._prompts = tokenizer, stops, prompts

    def score(self, prompts: list[int], sampled: Rows, iteration: int, first_id: int = 0) -> ScoredRollout:
        """Replies to `prompts` (their numbers), scored by all at the same time."""
        models, rewards = self._models, self._rewards
        asked, ids = [self._prompts[i] for i in prompts], sampled["response_ids"]
        messages = [said for said, _ in asked]
        prompt_ids = prompt_tokens(sampled, [tokens for _, tokens in asked])
        replies = own_texts(self._tokenizer, sampled)
        rows = text_rows(prompt_ids, ids) | {"id": np.arange(first_id, first_id + len(ids))}
        whole = text_rows(prompt_ids, (with_end_of_turn(reply, self._stops) for reply in ids))
        roles = [role for role in ("policy", "reference", "critic") if role in models]
        # With a lag the generator is at work too.
        at_once = len(roles) + len(rewards.roles) + self._config.lag
        given = dict.fromkeys(roles, rows)
        if rewards.branches:
            given["policy"] = rows | whole | {"added_ends": rows["input_ids"].lengths < whole["input_ids"].lengths}
        if self._one_trunk:
            passed = {"input_ids": given["policy"]["input_ids"], "id": rows["id"]}
            states = get(models["policy"].trunk.remote(passed, 1 + self._config.lag))["trunk"]
            given["critic"] = rows | {"trunk": states.heads(rows["input_ids"].lengths)}
        calls = [models[role].score.remote(given[role], at_once) for role in roles]
        answers = get_all([*calls, *rewards.requests(models, messages, replies, whole, at_once)])
        scores: Rows = {}
        for answer in answers[: len(roles)]:
            scores |= answer
        sources = rewards.scores(
            answers[len(roles) :],
            [prompt_text(said) for said in messages],
            replies,
            scores,
            messages=messages,
            columns=self._prompts.columns(prompts),
            step=iteration,
            episodes=episode_scores(sampled),
            tokens=whole,
        )
        return ScoredRollout(prompts, replies, sampled, rows, scores, sources)
