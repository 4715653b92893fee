"""Objectives: how each role is trained and scored, one small class a role, in pure torch over a `HeadedLM`.

This module has the shared code, SFT and the reference; each method's folder has its own. Separate files keep the stage
keys apart: a change of one algorithm recomputes nothing that another trained.

A loss is a sum of components: Σ_c coef_c · (Σ_i w_ci x_ci) / n_c. A component gives its terms x_c, one a token, a row
or a pair of a micro-batch, and their weights w_c; n_c is its own count over *all* micro-batches and ranks of the step
(`StepTotals`), so how a step is split does not matter. A new loss is a new component, and nothing else changes.

Rows are a `TextBatch` of tensors. `input_ids` has N values: each row's prompt and response after those of the row
before. What belongs to response tokens is [R], in the same order. `trunk` [N, H] holds the frozen lower layers' output
where it is already known. `alike` [B'] is, for each of the
`sequences`, the first with the same prompt: where it is given, the model computes a shared prompt once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from xray_runtime.algorithms.logprobs import NO_LOGPROB, within_kept
from xray_runtime.data.batch import PairBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.models.cached import cached_property
from xray_runtime.models.heads import Branch, HeadedLM
from xray_runtime.models.packing import Prompts
from xray_runtime.models.sequence_parallel import States

Texts: TypeAlias = TextBatch[Tensor]
Tensors: TypeAlias = dict[str, Tensor]
R = TypeVar("R", bound=TextBatch[Tensor])


class Forward(Generic[R]):
    """A forward pass over a micro-batch. What several components read is computed once, as the first one reads it."""

    def __init__(self, module: HeadedLM, rows: R) -> None:
        self.module, self.rows = module, rows

    @cached_property
    def hidden(self) -> States:
        """Last hidden states [N', H] of `sequences`."""
        return last_hidden(self.module, self.rows)


F = TypeVar("F", bound=Forward[Any])


@dataclass(frozen=True)
class Terms:
    """A component's terms [n] of a micro-batch, with gradients, and their weights [n]; None: 1."""

    values: Tensor
    weights: Tensor | None = None
    sums: Tensors = field(default_factory=dict)
    """Sums for the log, detached."""

    def sum(self) -> Tensor:
        """Σ w x."""
        return (self.values if self.weights is None else self.values * self.weights).sum()


class Component(Generic[F]):
    """One component of a loss; by default with coefficient 1, as a mean over the response tokens that count."""

    counted: ClassVar[str] = "tokens"
    """The count of the step that its mean divides by: `tokens`, `rows`, or a name in `StepTotals.counts`."""
    logged: ClassVar[str | None] = None
    """Name of Σ w x among the sums for the log; None: it is not logged."""

    def coef(self, totals: StepTotals) -> float:
        """Its coefficient; 0: it is left out of the loss."""
        return 1.0

    def count(self, totals: StepTotals) -> float:
        """n, over the whole step."""
        return totals.count(self.counted)

    def terms(self, forward: F, totals: StepTotals) -> Terms:
        """Its terms of a micro-batch."""
        raise NotImplementedError


class Objective(Generic[F]):
    """The use of a model: how it is scored, and the components of the loss that trains it; none: it only scores."""

    def components(self, module: HeadedLM) -> Sequence[Component[F]]:
        """The components of its loss."""
        return ()

    def forward(self, module: HeadedLM, rows: Texts) -> F:
        """The forward pass that its components read."""
        return cast("F", Forward(module, rows))

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        """Its scores of rows, without gradients."""
        raise NotImplementedError


class Loss(NamedTuple):
    """A micro-batch's share of the loss."""

    loss: Tensor
    sums: Tensors
    """Sums over its rows for the log."""


def training_loss(module: HeadedLM, objective: Objective[Any], rows: Texts, totals: StepTotals) -> Loss:
    """Σ_c coef_c · (Σ w x)_c / n_c over the objective's components, in their order, and then the model's own auxiliary
    loss, if its config asks for one."""
    components = [*objective.components(module)]
    if not components:
        raise TypeError(f"{type(objective).__name__} has no loss: its model is never trained")
    if not any(component.coef(totals) for component in components):
        raise ValueError(f"{type(objective).__name__}: the coefficient of every component of its loss is 0")
    if module.auxiliary is not None:
        components.append(AuxiliaryLoss())
    module = module.noting_passes()
    forward = objective.forward(module, rows)
    parts: list[Tensor] = []
    sums: Tensors = {}
    for component in components:
        terms = component.terms(forward, totals)
        total, coef = terms.sum(), component.coef(totals)
        sums |= terms.sums
        if component.logged is not None:
            sums[component.logged] = total.detach()
        if coef:
            parts.append(coef * total / component.count(totals))
    if module.passes is not None:
        sums |= module.passes.statistics()
    return Loss(sum(parts[1:], parts[0]), sums)


class AuxiliaryLoss(Component[Forward[Any]]):
    """The auxiliary loss of the model's family. It is no sum over tokens, so each micro-batch's counts by its rows."""

    counted = "rows"

    def terms(self, forward: Forward[Any], totals: StepTotals) -> Terms:
        assert forward.module.passes is not None
        return Terms(forward.module.passes.loss() * len(forward.rows))


def sequences(rows: Texts) -> Texts:
    """The B' texts that go through the model: of pairs all chosen, then all rejected ones, both with their prompts."""
    if not isinstance(rows, PairBatch):
        return rows
    ids = _one_after_other(rows.input_ids, rows.rejected_ids)
    texts = TextBatch(input_ids=ids, prompt_lengths=rows.prompt_lengths.repeat(2))
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


def last_hidden(module: HeadedLM, rows: Texts) -> States:
    """Last hidden states [N', H] of `sequences`."""
    texts = sequences(rows)
    trunk = texts.trunk.values if "trunk" in texts else None
    given = texts.input_ids.values, texts.input_ids.lengths, trunk, prompts_of(rows)
    return module.hidden(*given, _routes(texts)) if "route_ids" in texts else module.hidden(*given)


def _routes(rows: Texts) -> Tensor:
    """The experts of each token [N, L, K] int64; −1 where they are not known."""
    ids = rows.route_ids.values
    found = ids.long()
    return found.masked_fill(found == torch.iinfo(ids.dtype).max, -1)


def branch_states(module: HeadedLM, branch: Branch, rows: Texts) -> Tensor:
    """Last hidden states [N, H] of a branch, from the rows' `trunk`."""
    return module.branch_hidden(branch, rows.trunk.values, rows.input_ids.lengths, prompts_of(rows))


def response_positions(rows: Texts) -> Tensor:
    """Indices of response tokens among all tokens [R]; the state before each predicts it."""
    lengths = rows.input_ids.lengths
    first = rows.input_ids.offsets[:-1] + rows.prompt_lengths
    num_tokens = len(rows.input_ids.values)
    places = torch.arange(num_tokens, device=first.device)
    return (places >= first.repeat_interleave(lengths, output_size=num_tokens)).nonzero().squeeze(-1)


class Predictions(NamedTuple):
    """A model's answer for response tokens; where the rows have kept sets, by the distributions on these."""

    logprobs: Tensor
    """[R]."""
    entropy: Tensor
    """[R]."""
    of_candidates: Tensor | None
    """[R, k]; `NO_LOGPROB` where there is no candidate."""
    kept_mass: Tensor | None
    """Probability of the kept set [R]."""


def response_logprobs(module: HeadedLM, hidden: States, rows: Texts, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs [R], entropy [R]) of the response tokens; see `response_predictions`."""
    return response_predictions(module, hidden, rows, temperature)[:2]


def response_predictions(
    module: HeadedLM, hidden: States, rows: Texts, temperature: float, candidates: Tensor | None = None
) -> Predictions:
    """Log-probabilities of the response tokens, and of `candidates` [R, k] in their places (−1: none). Logits are
    computed at their positions alone."""
    at = response_positions(rows)
    given, targets = hidden[at - 1], rows.input_ids.values[at]
    if candidates is None and "kept_ids" not in rows:
        return Predictions(*module.logprobs(given, targets, temperature), None, None)
    wanted = targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates.clamp(min=0)], 1)
    mass = None
    if "kept_ids" in rows:
        kept, there = _kept_sets(rows)
        whole, _ = module.logprobs(given, torch.cat([wanted, kept], 1), temperature)
        num = wanted.shape[1]
        logprobs, entropy, log_mass = within_kept(whole[:, :num], whole[:, num:], there)
        mass = log_mass.exp()
    else:
        logprobs, entropy = module.logprobs(given, wanted, temperature)
    found = None if candidates is None else logprobs[:, 1:].masked_fill(candidates < 0, NO_LOGPROB)
    return Predictions(logprobs[:, 0], entropy, found, mass)


def _kept_sets(rows: Texts) -> tuple[Tensor, Tensor]:
    """(ids [R, m] of the kept set at each response token, which of them there are [R, m])."""
    counts = rows.kept_counts.values
    there = torch.arange(int(counts.max()) if len(counts) else 0, device=counts.device) < counts[:, None]
    ids = torch.zeros_like(there, dtype=torch.int64)
    return ids.masked_scatter(there, rows.kept_ids.values.long()), there


def of_responses(flat: Tensor, rows: Texts) -> Ragged[Tensor]:
    """Values of response tokens [R] as rows."""
    prompts = rows.prompt_lengths.cumsum(0)
    return Ragged(flat, rows.input_ids.offsets - torch.cat([prompts.new_zeros(1), prompts]))


def reply_sums(flat: Tensor, rows: Texts) -> Tensor:
    """Sums [B] of the values of each row's response tokens [R], in one operation for all rows; in float64, since it
    adds them one after another."""
    counts = rows.input_ids.lengths - rows.prompt_lengths
    of_row = torch.arange(len(counts), device=flat.device).repeat_interleave(counts, output_size=len(flat))
    sums = flat.new_zeros(len(counts), dtype=torch.float64).index_add(0, of_row, flat.double())
    return sums.to(flat.dtype)


class CrossEntropy(Component[Forward[Texts]]):
    """−log p of each token that counts."""

    logged = "nll"

    def terms(self, forward: Forward[Texts], totals: StepTotals) -> Terms:
        return Terms(-_masked_logprobs(forward)[0])


@dataclass(frozen=True)
class SFTObjective(Objective[Forward[Texts]]):
    """Cross-entropy of what the assistant said: of response tokens [R], those where `response_mask` is True; without
    that column, all."""

    def components(self, module: HeadedLM) -> tuple[CrossEntropy]:
        return (CrossEntropy(),)

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        logprobs, mask = _masked_logprobs(self.forward(module, rows))
        # With zeros in between: rows are told apart by their lengths.
        flat = logprobs.new_zeros(len(mask)).masked_scatter(mask, logprobs)
        return Scores(nll=-reply_sums(flat, rows))


def _masked_logprobs(forward: Forward[Texts]) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the tokens that count, which of the response tokens those are [R])."""
    module, rows, at = forward.module, forward.rows, response_positions(forward.rows)
    mask = rows.response_mask.values if "response_mask" in rows else torch.ones_like(at, dtype=torch.bool)
    at = at[mask]
    logprobs, _ = module.logprobs(forward.hidden[at - 1], rows.input_ids.values[at], 1.0)
    return logprobs, mask


@dataclass(frozen=True)
class ReferenceObjective(Objective[Forward[Texts]]):
    """Log-probabilities under a frozen model."""

    temperature: float

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        logprobs, _ = response_logprobs(module, last_hidden(module, rows), rows, self.temperature)
        return Scores(ref_logprobs=of_responses(logprobs, rows))
