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
from xray_runtime.data.rows import Rows
from xray_runtime.data.text_rows import text_rows, with_end_of_turn
from xray_runtime.data.tokenizing import decode_replies, own_text
from xray_runtime.rewards.source import Score, failure
from xray_runtime.rl.types import Rollout, Scores, Text, rows_at, rows_replaced, to_rows
from xray_runtime.workers.protocols import ModelHandle, get, get_all

if TYPE_CHECKING:
    from xray_runtime.config.ppo import PPOConfig
    from xray_runtime.rl.reward_sources import RewardSources
    from xray_runtime.training.prompts import UniquePrompts


def own_texts(tokenizer: Any, rollout: Rollout) -> list[str]:
    """What the policy said: of an episode without what it read in between."""
    ids = rollout.response_ids
    if rollout.episodes is None:
        return decode_replies(tokenizer, [reply.tolist() for reply in ids])
    return [own_text(tokenizer, *row) for row in zip(ids, rollout.episodes.response_mask, strict=True)]


def prompt_tokens(rollout: Rollout, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int] | np.ndarray]:
    """`prompts`, or what an environment began its episodes with in their place."""
    return prompts if rollout.episodes is None else list(rollout.episodes.prompt_ids)


def episode_scores(rollout: Rollout) -> list[Score] | None:
    """What their environment gave episodes, or why it failed; None where replies are no episodes."""
    if rollout.episodes is None:
        return None
    given = zip(rollout.episodes.episode_reward.tolist(), rollout.episodes.failure.tolist(), strict=True)
    return [failure(why) if why else Score(reward) for reward, why in given]


@dataclass(frozen=True)
class ScoredRollout:
    """Replies with their scores, row by row."""

    rollout: Rollout
    text: Text
    replies: list[str]
    scores: Scores
    sources: SourceScores
    dropped: tuple[ScoredRollout, ...] = ()
    """Rows that others took the place of, by round."""

    @property
    def num_dropped(self) -> int:
        return sum(len(round.replies) for round in self.dropped)

    def at(self, places: Sequence[int]) -> ScoredRollout:
        """The rows at `places`."""
        index = torch.tensor(places)
        values, applies, apart = self.sources.values, self.sources.applies, self.sources.disagreements
        return ScoredRollout(
            rows_at(self.rollout, places),
            rows_at(self.text, places),
            [self.replies[place] for place in places],
            rows_at(self.scores, places),
            SourceScores(
                {name: of[index] for name, of in values.items()},
                {name: of[index] for name, of in applies.items()},
                {name: of[index] for name, of in apart.items()},
                {name: [whys[place] for place in places] for name, whys in self.sources.failures.items()},
            ),
        )

    def replaced(self, places: Sequence[int], by: ScoredRollout) -> ScoredRollout:
        """The same with `by` in the rows at `places`."""

        def column(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return old.index_copy(0, torch.tensor(places), new)

        def listed(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
            given = dict(zip(places, new, strict=True))
            return [given.get(place, value) for place, value in enumerate(old)]

        values = {name: column(old, by.sources.values[name]) for name, old in self.sources.values.items()}
        applies = {name: column(old, by.sources.applies[name]) for name, old in self.sources.applies.items()}
        apart = {name: column(old, by.sources.disagreements[name]) for name, old in self.sources.disagreements.items()}
        failures = {name: listed(old, by.sources.failures[name]) for name, old in self.sources.failures.items()}
        return ScoredRollout(
            rows_replaced(self.rollout, places, by.rollout),
            rows_replaced(self.text, places, by.text),
            listed(self.replies, by.replies),
            rows_replaced(self.scores, places, by.scores),
            SourceScores(values, applies, apart, failures),
            (*self.dropped, self.at(places)),
        )

    def tied(self, weights: Mapping[str, float], group_size: int) -> list[int]:
        """The rows of groups, of `group_size` replies to one prompt each, whose rewards as scored are all the same."""
        groups = torch.arange(len(self.replies)) // group_size
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

    def score(self, rollout: Rollout, iteration: int, first_id: int = 0) -> ScoredRollout:
        """A rollout, scored by all at the same time."""
        models, rewards, ids = self._models, self._rewards, rollout.response_ids
        prompts = rollout.prompt.tolist()
        asked = [self._prompts[i] for i in prompts]
        messages = [message for message, _ in asked]
        prompt_ids = prompt_tokens(rollout, [tokens for _, tokens in asked])
        replies = own_texts(self._tokenizer, rollout)
        text = Text(**text_rows(prompt_ids, ids), id=np.arange(first_id, first_id + len(ids)))
        whole = text_rows(prompt_ids, (with_end_of_turn(reply, self._stops) for reply in ids))
        given = self._given(to_rows(text), whole)
        # With a lag the generator is at work too.
        at_once = len(given) + len(rewards.roles) + self._config.lag
        calls = [models[role].score.remote(rows, at_once) for role, rows in given.items()]
        answers = get_all([*calls, *rewards.requests(models, messages, replies, whole, at_once)])
        said: Rows = {}
        for answer in answers[: len(calls)]:
            said |= answer
        sources = rewards.scores(
            answers[len(calls) :],
            [prompt_text(message) for message in messages],
            replies,
            said,
            messages=messages,
            columns=self._prompts.columns(prompts),
            step=iteration,
            episodes=episode_scores(rollout),
            tokens=whole,
        )
        return ScoredRollout(rollout, text, replies, Scores.read(said), sources)

    def _given(self, rows: Rows, whole: Rows) -> dict[str, Rows]:
        """Role → the rows that its model scores.

        Args:
            rows: as they were sampled.
            whole: with an end of turn, for reward models.
        """
        models = self._models
        given = {role: rows for role in ("policy", "reference", "critic") if role in models}
        if self._rewards.branches:
            given["policy"] = rows | whole | {"added_ends": rows["input_ids"].lengths < whole["input_ids"].lengths}
        if self._one_trunk:
            passed = {"input_ids": given["policy"]["input_ids"], "id": rows["id"]}
            states = get(models["policy"].trunk.remote(passed, 1 + self._config.lag))["trunk"]
            given["critic"] = rows | {"trunk": states.heads(rows["input_ids"].lengths)}
        return given
