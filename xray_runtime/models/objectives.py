"""Objectives: how each role is trained and scored, one small class a role, in pure torch over a `HeadedLM`.

This module has the shared code, SFT and the reference; `reward_objective` and `ppo_objectives` have the others.
Separate files keep the stage keys apart: a change of one algorithm recomputes nothing that another trained.

An objective has `score(module, rows)`, without gradient, and `loss(module, rows, totals)`, this micro-batch's share of
the loss: a sum divided by *global* counts in `totals`, plus sums for the log, or columns [R]. A new algorithm is a new
objective; nothing else changes.

Rows are a `TextBatch` of tensors. `input_ids` has N values: each row's prompt and response after those of the row
before. What belongs to response tokens is [R], in the same order. `trunk` [N, H] holds the frozen lower layers' output
where it is already known; of pairs, `rejected_trunk` that of the rejected side. `alike` [B'] is, for each of the
`sequences`, the first with the same prompt: where it is given, the model computes a shared prompt once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from xray_runtime.data.batch import PairBatch, Scores, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.packing import Prompts

Texts: TypeAlias = TextBatch[Tensor]
Tensors: TypeAlias = dict[str, Tensor]
R = TypeVar("R", bound=TextBatch[Tensor])
R_contra = TypeVar("R_contra", bound=TextBatch[Tensor], contravariant=True)


class Objective(Protocol[R_contra]):
    """`rows` are of the kind of batch that it trains on."""

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]: ...

    def loss(self, module: HeadedLM, rows: R_contra, totals: dict[str, float]) -> tuple[Tensor, Tensors]: ...


def training_loss(
    module: HeadedLM, objective: Objective[R], rows: R, totals: dict[str, float]
) -> tuple[Tensor, Tensors]:
    """`objective.loss`, and the model's auxiliary loss if its config asks for one.

    That is not a sum over tokens: each micro-batch's counts by its share of the step's rows, `step_rows` in `totals`.
    """
    if module.auxiliary is None:
        return objective.loss(module, rows, totals)
    (loss, stats), auxiliary = module.with_auxiliary(lambda noting: objective.loss(noting, rows, totals))
    return loss + auxiliary * len(rows) / totals["step_rows"], stats


def sequences(rows: Texts) -> Texts:
    """The B' texts that go through the model: of pairs all chosen, then all rejected ones, both with their prompts."""
    if not isinstance(rows, PairBatch):
        return rows
    ids = _one_after_other(rows.input_ids, rows.rejected_ids)
    texts = TextBatch(input_ids=ids, prompt_lengths=rows.prompt_lengths.repeat(2))
    if "rejected_trunk" in rows:
        return texts.with_columns(trunk=_one_after_other(rows.trunk, rows.rejected_trunk))
    return texts.with_columns(trunk=rows.trunk) if "trunk" in rows else texts


def _one_after_other(one: Ragged[Tensor], other: Ragged[Tensor]) -> Ragged[Tensor]:
    offsets = torch.cat([one.offsets, other.offsets[1:] + one.offsets[-1]])
    return Ragged(torch.cat([one.values, other.values]), offsets)


def prompts_of(rows: Texts) -> Prompts | None:
    """Which of the `sequences` share their prompts; None where the rows do not say."""
    if "alike" not in rows:
        return None
    lengths = rows.prompt_lengths
    return Prompts(rows.alike, lengths.repeat(len(rows.alike) // len(lengths)))


def num_computed_tokens(module: HeadedLM, rows: Texts) -> int:
    """Tokens that go through the model's layers: padding counts where it pads, a shared prompt once where it packs."""
    ids = sequences(rows).input_ids
    if not module.packs:
        return len(ids) * int(ids.lengths.max())
    prompts = prompts_of(rows)
    if prompts is None:
        return len(ids.values)
    again = prompts.first != torch.arange(len(ids), device=ids.values.device)
    return len(ids.values) - int(prompts.lengths[again].sum())


def last_hidden(module: HeadedLM, rows: Texts) -> Tensor:
    """Last hidden states [N', H] of `sequences`."""
    texts = sequences(rows)
    trunk = texts.trunk.values if "trunk" in texts else None
    return module.hidden(texts.input_ids.values, texts.input_ids.lengths, trunk, prompts_of(rows))


def response_positions(rows: Texts) -> Tensor:
    """Indices of response tokens among all tokens [R]; the state before each predicts it."""
    lengths = rows.input_ids.lengths
    first = rows.input_ids.offsets[:-1] + rows.prompt_lengths
    places = torch.arange(len(rows.input_ids.values), device=first.device)
    return (places >= first.repeat_interleave(lengths)).nonzero().squeeze(-1)


def response_logprobs(module: HeadedLM, hidden: Tensor, rows: Texts, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs [R], entropy [R]) of the response tokens: logits are computed at their positions alone."""
    at = response_positions(rows)
    return module.logprobs(hidden[at - 1], rows.input_ids.values[at], temperature)


def of_responses(flat: Tensor, rows: Texts) -> Ragged[Tensor]:
    """Values of response tokens [R] as rows."""
    prompts = rows.prompt_lengths.cumsum(0)
    return Ragged(flat, rows.input_ids.offsets - torch.cat([prompts.new_zeros(1), prompts]))


def by_row(flat: Tensor, rows: Texts) -> list[Tensor]:
    """Values of response tokens [R], split by row."""
    return list(flat.split((rows.input_ids.lengths - rows.prompt_lengths).tolist()))


@dataclass(frozen=True)
class SFTObjective:
    """Cross-entropy of what the assistant said: of response tokens [R], those where `response_mask` is True; without
    that column, all."""

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        logprobs, mask = _masked_logprobs(module, rows)
        # With zeros in between: rows are told apart by their lengths.
        flat = logprobs.new_zeros(len(mask)).masked_scatter(mask, logprobs)
        return Scores(nll=torch.stack([-reply.sum() for reply in by_row(flat, rows)]))

    def loss(self, module: HeadedLM, rows: Texts, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        logprobs, _ = _masked_logprobs(module, rows)
        total = -logprobs.sum()
        return total / totals["tokens"], {"nll": total.detach()}


def _masked_logprobs(module: HeadedLM, rows: Texts) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the tokens that count, which of the response tokens those are [R])."""
    at = response_positions(rows)
    mask = rows.response_mask.values if "response_mask" in rows else torch.ones_like(at, dtype=torch.bool)
    at = at[mask]
    logprobs, _ = module.logprobs(last_hidden(module, rows)[at - 1], rows.input_ids.values[at], 1.0)
    return logprobs, mask


@dataclass(frozen=True)
class ReferenceObjective:
    """Log-probabilities under a frozen model."""

    temperature: float

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        logprobs, _ = response_logprobs(module, last_hidden(module, rows), rows, self.temperature)
        return Scores(ref_logprobs=of_responses(logprobs, rows))

    def loss(self, module: HeadedLM, rows: Texts, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        raise TypeError("the reference is never trained")
