"""What a model is trained for and scored by: one small class a role, pure torch over a `HeadedLM`.

An objective has `score(module, rows)`, tensors a row without gradient, and `loss(module, rows, totals)`, this
micro-batch's share of the loss: a sum divided by *global* counts in `totals`, plus sums for the log. A new algorithm is
a new objective; nothing else changes.

Rows (B of them) carry `input_ids` [B, S] (prompt then response, right-padded), `prompt_lengths` [B] and `lengths` [B].
Response tensors are [B, T], token t standing at column prompt_length + t. `trunk` [B, S, H] holds the frozen lower
layers' output where it is already known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from xray_runtime.algorithms.logprobs import logprobs_and_entropy
from xray_runtime.algorithms.losses import pairwise_loss, policy_loss, value_loss
from xray_runtime.config.ppo import PPOStageConfig
from xray_runtime.models.heads import HeadedLM

Tensors = dict[str, Tensor]


class Objective(Protocol):
    def score(self, module: HeadedLM, rows: Tensors) -> Tensors: ...

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]: ...


def sequences(rows: Tensors) -> Tensor:
    """The token ids [B', S] that go through the model: of a pair's rows, first all chosen, then all rejected ones."""
    return torch.cat([rows["input_ids"], rows["rejected_ids"]]) if "rejected_ids" in rows else rows["input_ids"]


def response_positions(rows: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where response tokens are: (row [N], t [N], column of the state that predicts it [N], mask [B, T])."""
    num_tokens = rows["lengths"] - rows["prompt_lengths"]
    steps = torch.arange(int(num_tokens.max()), device=num_tokens.device)
    mask = steps < num_tokens[:, None]
    row, t = mask.nonzero(as_tuple=True)
    return row, t, rows["prompt_lengths"][row] - 1 + t, mask


def response_logprobs(module: HeadedLM, hidden: Tensor, rows: Tensors, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs [N], entropy [N]) of the response tokens: logits are computed at their positions alone."""
    row, _, column, _ = response_positions(rows)
    targets = rows["input_ids"][row, column + 1]
    return logprobs_and_entropy(module.logits(hidden[row, column]), targets, temperature)


def _spread(flat: Tensor, rows: Tensors) -> Tensor:
    """[N] response values as [B, T], 0 elsewhere."""
    row, t, _, mask = response_positions(rows)
    out = flat.new_zeros(mask.shape)
    out[row, t] = flat
    return out


@dataclass(frozen=True)
class SFTObjective:
    """Cross-entropy of the reply's tokens."""

    def score(self, module: HeadedLM, rows: Tensors) -> Tensors:
        logprobs, _ = response_logprobs(module, module.hidden(rows["input_ids"], rows.get("trunk")), rows, 1.0)
        return {"nll": -_spread(logprobs, rows).sum(-1)}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        logprobs, _ = response_logprobs(module, module.hidden(rows["input_ids"], rows.get("trunk")), rows, 1.0)
        total = -logprobs.sum()
        return total / totals["tokens"], {"nll": total.detach()}


@dataclass(frozen=True)
class ReferenceObjective:
    """Log-probabilities under a frozen model."""

    temperature: float

    def score(self, module: HeadedLM, rows: Tensors) -> Tensors:
        hidden = module.hidden(rows["input_ids"], rows.get("trunk"))
        logprobs, _ = response_logprobs(module, hidden, rows, self.temperature)
        return {"ref_logprobs": _spread(logprobs, rows)}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        raise TypeError("the reference is never trained")


@dataclass(frozen=True)
class RewardObjective:
    """One number a reply, read at its last token; trained on pairs (`chosen_*` and `rejected_*` columns)."""

    def score(self, module: HeadedLM, rows: Tensors) -> Tensors:
        hidden = module.hidden(rows["input_ids"], rows.get("trunk"))
        last = hidden[torch.arange(len(hidden), device=hidden.device), rows["lengths"] - 1]
        return {"scores": module.scalars(last)}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        both = {
            "input_ids": sequences(rows),
            "lengths": torch.cat([rows["lengths"], rows["rejected_lengths"]]),
        }
        if "trunk" in rows:
            both["trunk"] = rows["trunk"]
        chosen, rejected = self.score(module, both)["scores"].chunk(2)
        loss, correct = pairwise_loss(chosen, rejected)
        return loss / totals["rows"], {"loss": loss.detach(), "correct": correct}


@dataclass(frozen=True)
class PPOObjective:
    """The policy, with a value head when the critic shares its trunk.

    `score` gives `logprobs`, with a value head `values` and `final_values`, with a reference branch `ref_logprobs`.
    """

    config: PPOStageConfig

    def score(self, module: HeadedLM, rows: Tensors) -> Tensors:
        hidden = module.hidden(rows["input_ids"], rows.get("trunk"))
        logprobs, _ = response_logprobs(module, hidden, rows, self.config.temperature)
        out = {"logprobs": _spread(logprobs, rows)}
        if module.scalar is not None:
            out |= _values(module, hidden, rows)
        if module.reference_layers is not None:
            ref_hidden = module.reference_hidden(rows["trunk"])
            ref_logprobs, _ = response_logprobs(module, ref_hidden, rows, self.config.temperature)
            out["ref_logprobs"] = _spread(ref_logprobs, rows)
        return out

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        hidden = module.hidden(rows["input_ids"], rows.get("trunk"))
        logprobs, entropy = response_logprobs(module, hidden, rows, self.config.temperature)
        row, t, column, _ = response_positions(rows)
        ones = torch.ones_like(logprobs)
        loss, stats = policy_loss(
            logprobs,
            rows["old_logprobs"][row, t],
            rows["advantages"][row, t],
            ones,
            clip_range=self.config.clip_range,
            dual_clip=self.config.dual_clip,
            weights=rows["weights"][row, t],
        )
        stats |= {"policy_loss": loss.detach(), "entropy_sum": entropy.sum().detach()}
        loss = loss - self.config.entropy_coef * entropy.sum()
        if module.scalar is not None:
            values = module.scalars(hidden[row, column])
            value, value_stats = value_loss(
                values,
                rows["values"][row, t],
                rows["returns"][row, t],
                ones,
                clip_range=self.config.value_clip_range,
            )
            loss = loss + self.config.value_coef * value
            stats |= value_stats | {"value_loss": value.detach()}
        return loss / totals["tokens"], stats


@dataclass(frozen=True)
class CriticObjective:
    """A critic of its own: the value of the state before each response token, and of the state after the last."""

    config: PPOStageConfig

    def score(self, module: HeadedLM, rows: Tensors) -> Tensors:
        return _values(module, module.hidden(rows["input_ids"], rows.get("trunk")), rows)

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        hidden = module.hidden(rows["input_ids"], rows.get("trunk"))
        row, t, column, _ = response_positions(rows)
        values = module.scalars(hidden[row, column])
        loss, stats = value_loss(
            values,
            rows["values"][row, t],
            rows["returns"][row, t],
            torch.ones_like(values),
            clip_range=self.config.value_clip_range,
        )
        return loss / totals["tokens"], stats | {"value_loss": loss.detach()}


def _values(module: HeadedLM, hidden: Tensor, rows: Tensors) -> Tensors:
    row, _, column, _ = response_positions(rows)
    last = hidden[torch.arange(len(hidden), device=hidden.device), rows["lengths"] - 1]
    return {"values": _spread(module.scalars(hidden[row, column]), rows), "final_values": module.scalars(last)}
