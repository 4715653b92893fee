"""The objectives of PPO: the policy, with or without a value head, and a critic of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from xray_runtime.algorithms.distillation import generalized_jsd
from xray_runtime.algorithms.losses import (
    PolicyLoss,
    PolicyLossInputs,
    clip_sums,
    kl_loss,
    token_loss,
    value_losses,
)
from xray_runtime.algorithms.score_centering import score_centering
from xray_runtime.algorithms.streams import TOPK_POLICY_LOGPROBS
from xray_runtime.data.batch import PolicyBatch, Scores, StepTotals
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.functions import built_in_loss
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import (
    Component,
    Forward,
    Objective,
    Predictions,
    Tensors,
    Terms,
    Texts,
    branch_states,
    last_hidden,
    of_responses,
    response_logprobs,
    response_positions,
    response_predictions,
)
from xray_runtime.models.sequence_parallel import States

if TYPE_CHECKING:
    from xray_runtime.methods.ppo.config import PPOStageConfig


OBSERVATIONS = "observations"
"""Count of a step's tokens that the policy read between its turns, and sum of their −log p."""
BY_TOKEN = (
    *("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "turns", "versions", "chosen"),
    *("topk_ids", "topk_logprobs"),
)
"""Columns of single tokens that a policy loss may read."""
CANDIDATES = ("topk_ids", "teacher_topk_ids")
"""Columns of tokens whose log-probabilities are computed beside those of the replies' own."""


class PolicyForward(Forward[PolicyBatch[Tensor]]):
    """The tensors that components of policy and critic read, [R] each."""

    def __init__(self, module: HeadedLM, rows: PolicyBatch[Tensor], config: PPOStageConfig) -> None:
        super().__init__(module, rows)
        self._config = config

    @cached_property
    def _predicted(self) -> Predictions:
        wanted = torch.cat([*self._candidates.values()], 1).long() if self._candidates else None
        return response_predictions(self.module, self.hidden, self.rows, self._config.temperature, wanted)

    @property
    def _candidates(self) -> dict[str, Tensor]:
        return {name: ids.values for name, ids in self.rows.pick(*CANDIDATES).items() if isinstance(ids, Ragged)}

    @cached_property
    def of_candidates(self) -> dict[str, Tensor]:
        """Name of one of `CANDIDATES` → log-probabilities of these tokens [R, k]."""
        found, widths = self._predicted.of_candidates, [ids.shape[1] for ids in self._candidates.values()]
        return {} if found is None else dict(zip(self._candidates, found.split(widths, 1), strict=True))

    @property
    def logprobs(self) -> Tensor:
        return self._predicted.logprobs

    @property
    def entropy(self) -> Tensor:
        return self._predicted.entropy

    @cached_property
    def values(self) -> Tensor:
        """Value of the state before each token."""
        return self.module.scalars(self.hidden[response_positions(self.rows) - 1])

    @cached_property
    def mask(self) -> Tensor:
        """1 at response tokens that the policy chose, 0 at those that it read in between."""
        # As log-probabilities and values, which are float32 at least.
        dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        if "response_mask" in self.rows:
            return self.rows.response_mask.values.to(dtype)
        return torch.ones_like(self.replies, dtype=dtype)

    @cached_property
    def replies(self) -> Tensor:
        """int64 from 0: which reply each token is of."""
        lengths = self.rows.input_ids.lengths - self.rows.prompt_lengths
        return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    @cached_property
    def streams(self) -> dict[str, Tensor]:
        """Name → values [R] of all that was sent and the policy's loss may read."""
        rows = self.rows
        by_token = {name: column.values for name, column in rows.pick(*BY_TOKEN).items() if isinstance(column, Ragged)}
        by_row = {"groups": rows.group} if "group" in rows else {}
        by_row |= {name: values for name, values in rows.others.items() if isinstance(values, Tensor)}
        of_policy = {TOPK_POLICY_LOGPROBS: self.of_candidates["topk_ids"]} if "topk_ids" in rows else {}
        return by_token | of_policy | {name: values[self.replies] for name, values in by_row.items()}

    @property
    def anchor(self) -> Tensor:
        """Log-probabilities where the ratio is 1: the policy's before the update, or if it was not scored then those of
        the policy that sampled."""
        return (self.rows.old_logprobs if "old_logprobs" in self.rows else self.rows.rollout_logprobs).values

    @cached_property
    def share(self) -> Tensor:
        """Weight of each token in the policy's means: `mask`, or with `loss_mean: replies` divided by its reply's
        tokens."""
        if self._config.loss_mean != "replies":
            return self.mask
        counts = self.mask.new_zeros(len(self.rows)).index_add_(0, self.replies, self.mask)
        return self.mask / counts[self.replies].clamp(min=1)


@dataclass(frozen=True)
class PolicyComponent(Component[PolicyForward]):
    """A mean over what the policy chose, by `loss_mean`."""

    config: PPOStageConfig

    def count(self, totals: StepTotals) -> float:
        if self.config.loss_mean == "tokens":
            return totals.tokens
        return totals.rows * (self.config.max_response_tokens if self.config.loss_mean == "fixed" else 1)


@dataclass(frozen=True)
class PolicyGradient(PolicyComponent):
    """The surrogate of the policy gradient, with importance weights."""

    own: PolicyLoss | None = None
    """A function of the user's; None: the built-in that `config.loss` names."""
    logged = "policy_loss"

    def terms(self, forward: PolicyForward, totals: StepTotals) -> Terms:
        config, rows, mask = self.config, forward.rows, forward.mask
        high = config.clip_range if config.clip_range_high is None else config.clip_range_high
        inputs = PolicyLossInputs(
            forward.logprobs,
            rows.advantages.values,
            mask,
            forward.replies,
            config.clip_range,
            high,
            config.dual_clip,
            forward.streams,
        )
        made = token_loss(self.own or built_in_loss(config.loss), inputs, config.loss)
        return Terms(made.loss, rows.weights.values * forward.share * mask, clip_sums(inputs, made))


@dataclass(frozen=True)
class ScoreCentering(PolicyComponent):
    """A · C, which takes from the policy gradient what the sampler's mismatch alone would move."""

    def terms(self, forward: PolicyForward, totals: StepTotals) -> Terms:
        config, q = self.config, forward.rows.topk_logprobs.values
        mode, cap, floor = config.importance_correction, config.importance_cap, config.importance_floor
        centering = score_centering(forward.of_candidates["topk_ids"], q, mode=mode, cap=cap, floor=floor)
        return Terms(forward.rows.advantages.values * centering, forward.share * forward.mask)


@dataclass(frozen=True)
class EntropyBonus(PolicyComponent):
    """−`entropy_coef` · entropy."""

    def coef(self, totals: StepTotals) -> float:
        return -self.config.entropy_coef

    def terms(self, forward: PolicyForward, totals: StepTotals) -> Terms:
        sums = {"entropy_sum": (forward.entropy * forward.mask).sum().detach()}
        return Terms(forward.entropy, forward.share, sums)


@dataclass(frozen=True)
class KLToReference(PolicyComponent):
    """The KL to the reference, where it is in the loss; its coefficient is the controller's."""

    def coef(self, totals: StepTotals) -> float:
        return totals.kl_coef

    def terms(self, forward: PolicyForward, totals: StepTotals) -> Terms:
        rows = forward.rows
        given = forward.logprobs, forward.anchor, rows.ref_logprobs.values
        return Terms(kl_loss(*given, self.config.kl.estimator), forward.share)


@dataclass(frozen=True)
class Observations(Component[PolicyForward]):
    """−log p of the tokens that the policy read between its turns, a mean over them alone (ECHO)."""

    config: PPOStageConfig
    counted = OBSERVATIONS
    logged = OBSERVATIONS

    def coef(self, totals: StepTotals) -> float:
        # A step may be over episodes of one turn each.
        return self.config.observation_coef if self.count(totals) else 0.0

    def terms(self, forward: PolicyForward, totals: StepTotals) -> Terms:
        return Terms(-forward.logprobs, 1 - forward.mask)


@dataclass(frozen=True)
class TeacherDivergence(PolicyComponent):
    """The divergence from the teacher's distribution at each token, where it is in the loss."""

    logged = "teacher_divergence"

    def coef(self, totals: StepTotals) -> float:
        return 0.0 if self.config.distillation is None else self.config.distillation.coef

    def terms(self, forward: PolicyForward, totals: StepTotals) -> Terms:
        config, of_teacher = self.config.distillation, forward.rows.teacher_topk_logprobs.values
        assert config is not None
        assert config.beta is not None
        given = forward.of_candidates["teacher_topk_ids"], of_teacher, config.beta
        found = generalized_jsd(*given, whole=config.top_k is None)
        return Terms(found, forward.share * forward.mask)


@dataclass(frozen=True)
class ValueRegression(Component[PolicyForward]):
    """The clipped squared error of the values, a mean over the tokens that the policy chose."""

    config: PPOStageConfig
    weight: float = 1.0
    logged = "value_loss"

    def coef(self, totals: StepTotals) -> float:
        return self.weight

    def terms(self, forward: PolicyForward, totals: StepTotals) -> Terms:
        rows, mask = forward.rows, forward.mask
        given = forward.values, rows.values.values, rows.returns.values
        losses, clipped = value_losses(*given, clip_range=self.config.value_clip_range)
        return Terms(losses, mask, {"value_clip_count": (clipped * mask).sum()})


@dataclass(frozen=True)
class PPOObjective(Objective[PolicyForward]):
    """The policy, with a value head when the critic shares its trunk.

    `score` gives `logprobs` and `entropy`, with a value head `values` and `final_values`, of a reference branch
    `ref_logprobs`, of each reward branch a number a row under its role; of rows with routes also `own_route_logprobs`,
    with kept sets `kept_mass`. Rows whose last token was added for reward models alone say so in `added_ends` [B].
    """

    config: PPOStageConfig
    policy_loss: PolicyLoss | None = None
    """A function of the user's; None: the built-in that `config.loss` names."""

    def components(self, module: HeadedLM) -> Sequence[Component[PolicyForward]]:
        config = self.config
        parts: list[Component[PolicyForward]] = [PolicyGradient(config, self.policy_loss), EntropyBonus(config)]
        if config.score_centering:
            parts.append(ScoreCentering(config))
        if config.has_reference and config.kl.place == "loss":
            parts.append(KLToReference(config))
        if config.distillation is not None and config.distillation.beta is not None:
            parts.append(TeacherDivergence(config))
        if config.observation_coef:
            parts.append(Observations(config))
        if module.scalar is not None:
            parts.append(ValueRegression(config, config.value_coef))
        return parts

    def forward(self, module: HeadedLM, rows: Texts) -> PolicyForward:
        return PolicyForward(module, cast("PolicyBatch[Tensor]", rows), self.config)

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        judged, rows = rows, _as_sampled(rows)
        hidden = last_hidden(module, rows)
        predicted = response_predictions(module, hidden, rows, self.config.temperature)
        scores = _values(module, hidden, rows) if module.scalar is not None else Scores[Tensor]()
        if predicted.kept_mass is not None:
            scores = scores.with_columns(kept_mass=of_responses(predicted.kept_mass, rows))
        if "route_ids" in rows:
            own = last_hidden(module, rows.with_columns(route_ids=None))
            own_logprobs, _ = response_logprobs(module, own, rows, self.config.temperature)
            scores = scores.with_columns(own_route_logprobs=of_responses(own_logprobs, rows))
        by_role: Tensors = {}
        for branch in module.branches:
            seen = rows if branch.scalar is None else judged
            states = branch_states(module, branch, seen)
            if branch.scalar is None:
                ref_logprobs, _ = response_logprobs(module, states, rows, self.config.temperature)
                scores = scores.with_columns(ref_logprobs=of_responses(ref_logprobs, rows))
            else:
                by_role[branch.role] = branch.scalar(states[seen.input_ids.offsets[1:] - 1]).squeeze(-1)
        scores = scores.with_columns(logprobs=of_responses(predicted.logprobs, rows))
        return scores.with_columns(entropy=of_responses(predicted.entropy, rows), **by_role)


@dataclass(frozen=True)
class CriticObjective(Objective[PolicyForward]):
    """A critic of its own: the value of the state before each response token, and of the state after the last. It
    chooses its own experts."""

    config: PPOStageConfig

    def components(self, module: HeadedLM) -> tuple[ValueRegression]:
        return (ValueRegression(self.config),)

    def forward(self, module: HeadedLM, rows: Texts) -> PolicyForward:
        return PolicyForward(module, cast("PolicyBatch[Tensor]", rows.with_columns(route_ids=None)), self.config)

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        return _values(module, last_hidden(module, rows), rows)


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


def _values(module: HeadedLM, hidden: States, rows: Texts) -> Scores[Tensor]:
    values = module.scalars(hidden[response_positions(rows) - 1])
    final_values = module.scalars(hidden[rows.input_ids.offsets[1:] - 1])
    return Scores(values=of_responses(values, rows), final_values=final_values)
