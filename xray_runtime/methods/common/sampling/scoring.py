"""A rollout with the scores of every model and reward source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from xray_runtime.algorithms.groups import tied_groups
from xray_runtime.algorithms.rewards import SourceScores, weighted_sum
from xray_runtime.cluster.protocols import ModelHandle, get_all
from xray_runtime.data.agent_conversations import conversation, conversation_text
from xray_runtime.data.batch import OF_KEPT_SETS, REPLAYED, Rollout, Scores, TextBatch, with_end_of_turn
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.columnar import ColumnBatch
from xray_runtime.data.tokenizing import decode_replies, decode_reply, own_text, sampled_turns, transcript
from xray_runtime.methods.common.sampling.agent_rows import decoded_branches, split_branches
from xray_runtime.methods.common.sampling.episode import no_turn
from xray_runtime.rewards.reward_reader import answer_rows
from xray_runtime.rewards.source import Score, failure

if TYPE_CHECKING:
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.methods.common.training.prompts import UniquePrompts
    from xray_runtime.methods.ppo.teachers import Teachers
    from xray_runtime.rewards.reward_sources import RewardSources


B = TypeVar("B", bound=ColumnBatch)


def own_texts(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    """The policy's own tokens as text, without those that an episode's policy read between turns."""
    ids = rollout.response_ids
    if not rollout.are_episodes:
        return decode_replies(tokenizer, [reply.tolist() for reply in ids])
    rows = list(zip(ids, rollout.response_mask, strict=True))
    if "branches" not in rollout:
        return [own_text(tokenizer, *row) for row in rows]
    texts = []
    for (reply, mask), branches in zip(rows, rollout.branches, strict=True):
        # A branch ends with a reply and the next may begin with one: two turns, which a mask does not tell apart.
        ends = np.cumsum([length for _, length in decoded_branches(branches)])[:-1]
        parts = zip(np.split(reply, ends), np.split(mask, ends), strict=True)
        texts.append("\n".join(own_text(tokenizer, *part) for part in parts if len(part[0])))
    return texts


def reasoning_lengths(tokenizer: Tokenizer, rollout: Rollout) -> list[int]:
    """Tokens of the reasoning of each reply, in all turns of an episode, with the tokens around it."""
    form, ids = chat_format(tokenizer), [reply.tolist() for reply in rollout.response_ids]
    if not rollout.are_episodes:
        return [form.num_reasoning(reply) for reply in ids]
    turns = (sampled_turns(reply, mask) for reply, mask in zip(ids, rollout.response_mask, strict=True))
    return [sum(map(form.num_reasoning, of_one)) for of_one in turns]


def prompt_tokens(rollout: Rollout, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int] | np.ndarray]:
    """`prompts`, or the tokens that environments began their episodes with."""
    return list(rollout.prompt_ids) if rollout.are_episodes else prompts


def episode_scores(rollout: Rollout) -> list[Score] | None:
    """The environment's score of each episode, or its failure; None if replies are not episodes."""
    if not rollout.are_episodes:
        return None
    seats = rollout.seat.tolist() if "seat" in rollout else [""] * len(rollout)
    results = zip(rollout.episode_reward.tolist(), rollout.failure.tolist(), seats, strict=True)
    return [
        replace(failure(why), is_due=why != no_turn(seat)) if why else Score(reward) for reward, why, seat in results
    ]


def shown_episodes(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    """Each episode for display, an agent's as a conversation with its branches."""
    if "branches" not in rollout:
        return [transcript(tokenizer, *row) for row in zip(rollout.response_ids, rollout.response_mask, strict=True)]
    decode = partial(decode_reply, tokenizer)
    rows = zip(rollout.answers.tolist(), rollout.version.tolist(), strict=True)
    records = ((json.loads(text), version) for text, version in rows)
    return [conversation_text(record, conversation(record, decode, version)) for record, version in records]


@dataclass(frozen=True)
class ScoredRollout:
    """Replies with their scores, row by row."""

    rollout: Rollout
    text: TextBatch
    replies: list[str]
    scores: Scores
    sources: SourceScores
    reasoning_lengths: list[int]
    """Tokens of each reply's reasoning."""
    dropped: tuple[ScoredRollout, ...] = ()
    """Rows that were replaced, by round."""

    @property
    def num_dropped(self) -> int:
        return sum(len(round.replies) for round in self.dropped)

    def rewards_by_prompt(self, weights: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """(prompt of each reply, its reward before scaling; NaN: it has none), with those of replaced rows."""
        rounds = (self, *self.dropped)
        prompts = np.concatenate([round.rollout.prompt for round in rounds])
        return prompts, np.concatenate([weighted_sum(round.sources, weights).double().numpy() for round in rounds])

    def replaced(self, places: Sequence[int], by: ScoredRollout) -> ScoredRollout:
        """The same with `by` in the rows at `places`."""
        index = np.arange(len(self.replies))
        index[places] = len(index) + np.arange(len(places))
        return replace(_gathered([self, by], index.tolist()), dropped=(*self.dropped, _gathered([self], places)))

    def tied(self, weights: Mapping[str, float], group_size: int) -> list[int]:
        """Rows of the groups (`group_size` replies to one prompt) whose raw rewards are all equal."""
        groups = torch.arange(len(self.replies)) // group_size
        tied: list[int] = tied_groups(weighted_sum(self.sources, weights), groups)[groups].nonzero()[:, 0].tolist()
        return tied


def _gathered(parts: Sequence[ScoredRollout], places: Sequence[int]) -> ScoredRollout:
    """The rows at `places` of the parts, which follow one another."""
    index, sources = torch.tensor(places), [part.sources for part in parts]

    def batched(batches: Sequence[B]) -> B:
        return type(batches[0]).concat(batches).take(places)

    def tensors(columns: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.cat([of[name] for of in columns])[index] for name in columns[0]}

    def listed(columns: Sequence[Sequence[Any]]) -> list[Any]:
        every = list(chain(*columns))
        return [every[index] for index in places]

    return ScoredRollout(
        batched([part.rollout for part in parts]),
        batched([part.text for part in parts]),
        listed([part.replies for part in parts]),
        batched([part.scores for part in parts]),
        SourceScores(
            tensors([of.values for of in sources]),
            tensors([of.applies for of in sources]),
            tensors([of.disagreements for of in sources]),
            {name: listed([of.failures[name] for of in sources]) for name in sources[0].failures},
            {name: listed([of.refused[name] for of in sources]) for name in sources[0].refused},
            len(places),
        ),
        listed([part.reasoning_lengths for part in parts]),
    )


class RolloutScorer:
    """Scores rollouts with the models of a stage.

    Args:
        stops: tokens that end a reply.
        own_reference: the reference is the policy with its adapters off.
        scores_policy: the policy scores each rollout too.
        teachers: they score each rollout.
    """

    def __init__(
        self,
        models: Mapping[str, ModelHandle],
        rewards: RewardSources,
        tokenizer: Tokenizer,
        stops: tuple[int, ...],
        prompts: UniquePrompts,
        own_reference: bool = False,
        scores_policy: bool = True,
        teachers: Teachers | None = None,
    ) -> None:
        self._teachers = teachers
        self._models, self._rewards = models, rewards
        self._tokenizer, self._stops, self._prompts = tokenizer, stops, prompts
        self._own_reference, self._scores_policy = own_reference, scores_policy

    def score(self, rollout: Rollout, iteration: int, first_id: int = 0) -> ScoredRollout:
        """Score a rollout with all models and sources at the same time."""
        models, rewards, ids = self._models, self._rewards, rollout.response_ids
        prompts = rollout.prompt.tolist()
        contents = [self._prompts[i] for i in prompts]
        messages = [message for message, _ in contents]
        prompt_ids = prompt_tokens(rollout, [tokens for _, tokens in contents])
        replies = own_texts(self._tokenizer, rollout)
        text = TextBatch.of(prompt_ids, ids).with_columns(id=np.arange(first_id, first_id + len(ids)))
        whole = TextBatch.of(prompt_ids, [with_end_of_turn(reply, self._stops) for reply in ids])
        read = whole if rollout.are_episodes else answer_rows(self._tokenizer, messages, replies, whole)
        branches = rollout.branches if "branches" in rollout else None
        rows, merged = split_branches(text, branches)
        inputs = self._inputs(rows, whole, rollout)
        calls = [models[role].score.remote(rows) for role, rows in inputs.items()]
        if self._own_reference:
            calls.append(models["policy"].reference.remote(rows.with_columns(**rollout.pick(*OF_KEPT_SETS))))
        columns = self._prompts.columns(prompts)
        teachers = self._teachers
        taught = None if teachers is None else teachers.requests(models, contents, rows, columns, iteration)
        # Reward models that are branches of the policy have scored whole replies with it.
        again = [models["policy"].score.remote(read)] if rewards.branches and read is not whole else []

        @cache
        def outputs() -> Scores:
            scores = Scores()
            for answer in get_all(calls):
                scores = scores.with_columns(**merged(answer).columns())
            if taught is not None:
                scores = scores.with_columns(**taught.get(scores.logprobs).columns())
            for answer in get_all(again):
                scores = scores.with_columns(**{role: answer.by_role(role) for role in rewards.branches})
            return scores

        sources = rewards.scores(
            rewards.requests(models, messages, replies, read),
            messages,
            replies,
            columns,
            outputs,
            step=iteration,
            episodes=episode_scores(rollout),
            tokens=read,
        )
        lengths = reasoning_lengths(self._tokenizer, rollout)
        return ScoredRollout(rollout, text, replies, outputs(), sources, lengths)

    def mismatch(self, scored: ScoredRollout, count: int) -> float:
        """Mean |log-probability difference| between generator and policy, in nats per token, over `count` rows that are
        spread over the rollout."""
        places = np.unique(np.linspace(0, len(scored.replies) - 1, count).round().astype(int))
        rollout = scored.rollout.take(places)
        rows, merged = split_branches(scored.text.take(places), rollout.branches if "branches" in rollout else None)
        (answer,) = get_all([self._models["policy"].score.remote(rows.with_columns(**rollout.pick(*REPLAYED)))])
        difference = np.abs(merged(answer).logprobs.values - rollout.rollout_logprobs.values)
        return float((difference[rollout.response_mask.values] if rollout.are_episodes else difference).mean())

    def _inputs(self, rows: TextBatch, whole: TextBatch, rollout: Rollout) -> dict[str, TextBatch]:
        """Role → the rows that its model scores; `rows` are as sampled, `whole` end each turn, for reward models."""
        # Routes are the policy's alone: its log-probabilities are compared with those of the generator.
        follows = {"policy": REPLAYED, "reference": OF_KEPT_SETS, "critic": ()}
        inputs = {
            role: rows.with_columns(**rollout.pick(*names)) for role, names in follows.items() if role in self._models
        }
        if not self._scores_policy:
            del inputs["policy"]
        if self._rewards.branches:
            added_ends = rows.input_ids.lengths < whole.input_ids.lengths
            inputs["policy"] = inputs["policy"].with_columns(**whole.columns(), added_ends=added_ends)
        return inputs
