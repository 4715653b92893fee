"""The objectives of PPO: the policy, with or without a value head, and a critic of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xray_runtime.algorithms.importance import flat_importance_weights
from xray_runtime.algorithms.losses import POLICY_LOSSES, PolicyLoss, kl_loss, policy_loss, value_loss
from xray_runtime.data.batch import PolicyBatch, Scores
from xray_runtime.data.ragged import Ragged
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import (
    Tensors,
    Texts,
    last_hidden,
    of_responses,
    prompts_of,
    response_logprobs,
    response_positions,
)

if TYPE_CHECKING:
    from xray_runtime.methods.ppo.config import PPOStageConfig


@dataclass(frozen=True)
class PPOObjective:
    """The policy, with a value head when the critic shares its trunk.

    `score` gives `logprobs`, with a value head `values` and `final_values`, of a reference branch `ref_logprobs`, of
    each reward branch a number a row under its role. Rows whose last token was added for reward models alone say so in
    `added_ends` [B].

    `loss` needs `tokens` or, by `loss_mean`, `rows` in `totals`, and `kl_coef` for a KL in the loss. Rows without
    `old_logprobs` are those of a rollout's first step: the pass computes them itself and gives them back as a column
    [R] among its sums, and importance weights come from `rollout_logprobs`.
    """

    config: PPOStageConfig
    policy_loss: PolicyLoss | None = None
    """A function of the user's; None: the built-in that `config.loss` names."""

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        judged, rows = rows, _as_sampled(rows)
        hidden = last_hidden(module, rows)
        logprobs, _ = response_logprobs(module, hidden, rows, self.config.temperature)
        scores = _values(module, hidden, rows) if module.scalar is not None else Scores[Tensor]()
        by_role: Tensors = {}
        for branch in module.branches:
            seen = rows if branch.scalar is None else judged
            ids = seen.input_ids
            states = module.branch_hidden(branch, seen.trunk.values, ids.lengths, prompts_of(seen))
            if branch.scalar is None:
                ref_logprobs, _ = response_logprobs(module, states, rows, self.config.temperature)
                scores = scores.with_columns(ref_logprobs=of_responses(ref_logprobs, rows))
            else:
                by_role[branch.role] = branch.scalar(states[ids.offsets[1:] - 1]).squeeze(-1)
        return scores.with_columns(logprobs=of_responses(logprobs, rows), **by_role)

    def loss(self, module: HeadedLM, rows: PolicyBatch[Tensor], totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        config, hidden = self.config, last_hidden(module, rows)
        logprobs, entropy = response_logprobs(module, hidden, rows, config.temperature)
        lengths = rows.input_ids.lengths - rows.prompt_lengths
        replies = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        # The policy did not choose the environment's tokens between its turns.
        mask = _counted(logprobs, rows)
        share = mask
        if config.loss_mean == "replies":
            counts = torch.zeros_like(lengths, dtype=mask.dtype).index_add_(0, replies, mask)
            share = share / counts[replies].clamp(min=1)
        first = "old_logprobs" not in rows
        old_logprobs = logprobs.detach() if first else rows.old_logprobs.values
        weights = _weights(config, old_logprobs, rows, mask, replies) if first else rows.weights.values
        loss, stats = policy_loss(
            logprobs,
            old_logprobs,
            rows.advantages.values,
            mask,
            clip_range=config.clip_range,
            clip_range_high=config.clip_range_high,
            dual_clip=config.dual_clip,
            weights=weights * share,
            loss=self.policy_loss or POLICY_LOSSES[config.loss],
            replies=replies,
        )
        stats |= {"policy_loss": loss.detach(), "entropy_sum": (entropy * mask).sum().detach()}
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (entropy * share).sum()
        if config.kl.place == "loss":
            kl = kl_loss(logprobs, old_logprobs, rows.ref_logprobs.values, config.kl.estimator)
            loss = loss + totals["kl_coef"] * (kl * share).sum()
        loss = loss / _mean_over(config, totals)
        if module.scalar is not None:
            value, value_stats = _value_loss(module, hidden, rows, config)
            loss = loss + config.value_coef * value / totals["tokens"]
            stats |= value_stats | {"value_loss": value.detach()}
        return loss, stats | {"old_logprobs": old_logprobs} if first else stats


@dataclass(frozen=True)
class CriticObjective:
    """A critic of its own: the value of the state before each response token, and of the state after the last."""

    config: PPOStageConfig

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        return _values(module, last_hidden(module, rows), rows)

    def loss(self, module: HeadedLM, rows: PolicyBatch[Tensor], totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        loss, stats = _value_loss(module, last_hidden(module, rows), rows, self.config)
        return loss / totals["tokens"], stats | {"value_loss": loss.detach()}


def _counted(like: Tensor, rows: Texts) -> Tensor:
    """1 at response tokens that the policy chose, 0 at those that it read in between [R]."""
    return rows.response_mask.values.to(like.dtype) if "response_mask" in rows else torch.ones_like(like)


def _weights(
    config: PPOStageConfig, old_logprobs: Tensor, rows: PolicyBatch[Tensor], mask: Tensor, replies: Tensor
) -> Tensor:
    return flat_importance_weights(
        old_logprobs,
        rows.rollout_logprobs.values,
        mask,
        replies,
        mode=config.importance_correction,
        cap=config.importance_cap,
        level=config.importance_level,
    )


def _as_sampled(rows: Texts) -> Texts:
    """The rows without the end tokens that were added to some."""
    if "added_ends" not in rows:
        return rows
    ids, added = rows.input_ids, rows.added_ends.long().cumsum(0)
    keep = torch.ones_like(ids.values, dtype=torch.bool)
    keep[ids.offsets[1:][rows.added_ends] - 1] = False
    offsets = ids.offsets - torch.cat([added.new_zeros(1), added])
    trunk = Ragged(rows.trunk.values[keep], offsets) if "trunk" in rows else None
    return rows.with_columns(input_ids=Ragged(ids.values[keep], offsets), trunk=trunk)


def _mean_over(config: PPOStageConfig, totals: dict[str, float]) -> float:
    """The divisor of sums over the whole minibatch, which has `tokens` tokens in `rows` replies."""
    if config.loss_mean == "tokens":
        return totals["tokens"]
    return totals["rows"] * (config.max_response_tokens if config.loss_mean == "fixed" else 1)


def _values(module: HeadedLM, hidden: Tensor, rows: Texts) -> Scores[Tensor]:
    values = module.scalars(hidden[response_positions(rows) - 1])
    final_values = module.scalars(hidden[rows.input_ids.offsets[1:] - 1])
    return Scores(values=of_responses(values, rows), final_values=final_values)


def _value_loss(
    module: HeadedLM, hidden: Tensor, rows: PolicyBatch[Tensor], config: PPOStageConfig
) -> tuple[Tensor, Tensors]:
    values = module.scalars(hidden[response_positions(rows) - 1])
    old_values, returns, mask = rows.values.values, rows.returns.values, _counted(values, rows)
    return value_loss(values, old_values, returns, mask, clip_range=config.value_clip_range)
