"""Objectives: how each role is trained and scored, one small class a role, in pure torch over a `HeadedLM`.

This module has the shared code, SFT and the reference; `reward_objective` and `ppo_objectives` have the others.
Separate files keep the stage keys apart: a change of one algorithm recomputes nothing that another trained.

An objective has `score(module, rows)`, without gradient, and `loss(module, rows, totals)`, this micro-batch's share of
the loss: a sum divided by *global* counts in `totals`, plus sums for the log, or columns [R]. A new algorithm is a new
objective; nothing else changes.

Rows (B of them) carry `input_ids` [N], each row's prompt and response after those of the row before, `lengths` [B] and,
of these, `prompt_lengths` [B]. What belongs to response tokens is [R], in the same order. `trunk` [N, H] holds the
frozen lower layers' output where it is already known; of pairs, `rejected_trunk` that of the rejected side. `alike`
[B'] is, for each of the `sequences`, the first with the same prompt: where it is given, the model computes a shared
prompt once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.packing import Prompts

Tensors = dict[str, Tensor]
Scores = dict[str, Tensor | list[Tensor]]
"""Name → numbers [B], or of each row's response tokens a tensor."""


class Objective(Protocol):
    def score(self, module: HeadedLM, rows: Tensors) -> Scores: ...

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]: ...


def training_loss(
    module: HeadedLM, objective: Objective, rows: Tensors, totals: dict[str, float]
) -> tuple[Tensor, Tensors]:
    """`objective.loss`, and the model's auxiliary loss if its config asks for one.

    That is not a sum over tokens: each micro-batch's counts by its share of the step's rows, `step_rows` in `totals`.
    """
    if module.auxiliary is None:
        return objective.loss(module, rows, totals)
    (loss, stats), auxiliary = module.with_auxiliary(lambda noting: objective.loss(noting, rows, totals))
    return loss + auxiliary * len(rows["lengths"]) / totals["step_rows"], stats


def sequences(rows: Tensors) -> tuple[Tensor, Tensor]:
    """(ids [N'], lengths [B']) of what goes through the model: of a pair's rows, all chosen, then all rejected ones."""
    if "rejected_ids" not in rows:
        return rows["input_ids"], rows["lengths"]
    ids = torch.cat([rows["input_ids"], rows["rejected_ids"]])
    return ids, torch.cat([rows["lengths"], rows["rejected_lengths"]])


def prompts_of(rows: Tensors) -> Prompts | None:
    """Which of the `sequences` share their prompts; None where the rows do not say."""
    if "alike" not in rows:
        return None
    lengths = rows["prompt_lengths"]
    return Prompts(rows["alike"], lengths.repeat(len(rows["alike"]) // len(lengths)))


def num_computed_tokens(module: HeadedLM, rows: Tensors) -> int:
    """Tokens that go through the model's layers: padding counts where it pads, a shared prompt once where it packs."""
    ids, lengths = sequences(rows)
    if not module.packs:
        return len(lengths) * int(lengths.max())
    prompts = prompts_of(rows)
    if prompts is None:
        return len(ids)
    again = prompts.first != torch.arange(len(lengths), device=lengths.device)
    return len(ids) - int(prompts.lengths[again].sum())


def last_hidden(module: HeadedLM, rows: Tensors) -> Tensor:
    """Last hidden states [N', H] of `sequences`."""
    trunk = rows.get("trunk")
    if "rejected_trunk" in rows:
        trunk = torch.cat([rows["trunk"], rows["rejected_trunk"]])
    return module.hidden(*sequences(rows), trunk, prompts_of(rows))


def response_positions(rows: Tensors) -> Tensor:
    """Indices of response tokens among all tokens [R]; the state before each predicts it."""
    lengths = rows["lengths"]
    first = lengths.cumsum(0) - lengths + rows["prompt_lengths"]
    places = torch.arange(len(rows["input_ids"]), device=first.device)
    return (places >= first.repeat_interleave(lengths)).nonzero().squeeze(-1)


def response_logprobs(module: HeadedLM, hidden: Tensor, rows: Tensors, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs [R], entropy [R]) of the response tokens: logits are computed at their positions alone."""
    at = response_positions(rows)
    return module.logprobs(hidden[at - 1], rows["input_ids"][at], temperature)


def by_row(flat: Tensor, rows: Tensors) -> list[Tensor]:
    """Values of response tokens [R], split by row."""
    return list(flat.split((rows["lengths"] - rows["prompt_lengths"]).tolist()))


@dataclass(frozen=True)
class SFTObjective:
    """Cross-entropy of what the assistant said: of response tokens [R], those where `response_mask` is True; without
    that column, all."""

    def score(self, module: HeadedLM, rows: Tensors) -> Scores:
        logprobs, mask = _masked_logprobs(module, rows)
        # With zeros in between: rows are told apart by their lengths.
        flat = logprobs.new_zeros(len(mask)).masked_scatter(mask, logprobs)
        return {"nll": torch.stack([-reply.sum() for reply in by_row(flat, rows)])}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        logprobs, _ = _masked_logprobs(module, rows)
        total = -logprobs.sum()
        return total / totals["tokens"], {"nll": total.detach()}


def _masked_logprobs(module: HeadedLM, rows: Tensors) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the tokens that count, which of the response tokens those are [R])."""
    at = response_positions(rows)
    mask = rows.get("response_mask", torch.ones_like(at, dtype=torch.bool))
    at = at[mask]
    logprobs, _ = module.logprobs(last_hidden(module, rows)[at - 1], rows["input_ids"][at], 1.0)
    return logprobs, mask


@dataclass(frozen=True)
class ReferenceObjective:
    """Log-probabilities under a frozen model."""

    temperature: float

    def score(self, module: HeadedLM, rows: Tensors) -> Scores:
        logprobs, _ = response_logprobs(module, last_hidden(module, rows), rows, self.temperature)
        return {"ref_logprobs": by_row(logprobs, rows)}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        raise TypeError("the reference is never trained")
