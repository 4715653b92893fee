"""What a model is trained for and scored by: one small class a role, pure torch over a `HeadedLM`.

Here is what all share, and SFT and the reference; `reward_objective` and `ppo_objectives` have the others, in files of
their own: who changes one algorithm recomputes nothing that another trained.

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


def spread(flat: Tensor, rows: Tensors) -> Tensor:
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
        return {"nll": -spread(logprobs, rows).sum(-1)}

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
        return {"ref_logprobs": spread(logprobs, rows)}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        raise TypeError("the reference is never trained")
