"""The objectives of policies that learn from labelled replies: pairs (DPO and its kin), and single ones (KTO).

`score` of either gives `reply_logprobs`, the log-probability of each whole reply [B]: the same passes make the
reference's, before training. A `PairBatch` has no `ref_chosen` and `ref_rejected` where the loss has no reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from xray_runtime.algorithms.preference_losses import implicit_rewards, kto_losses, pair_losses
from xray_runtime.algorithms.statistics import wins
from xray_runtime.data.batch import LabelledBatch, PairBatch, Scores, StepTotals, TextBatch
from xray_runtime.models.cached import cached_property
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import (
    Component,
    Forward,
    Objective,
    Terms,
    Texts,
    reply_sums,
    response_logprobs,
    sequences,
)

if TYPE_CHECKING:
    from xray_runtime.methods.dpo.config import DPOConfig
    from xray_runtime.methods.kto.config import KTOConfig

R = TypeVar("R", bound=TextBatch[Tensor])


class ReplyForward(Forward[R]):
    """Replies as a whole; of pairs all chosen ones first."""

    @cached_property
    def logprobs(self) -> Tensor:
        """Log-probability of each reply [B']."""
        texts = sequences(self.rows)
        logprobs, _ = response_logprobs(self.module, self.hidden, texts, 1.0)
        return reply_sums(logprobs, texts)

    @property
    def num_tokens(self) -> Tensor:
        """Number of tokens of each reply [B']."""
        texts = sequences(self.rows)
        return texts.input_ids.lengths - texts.prompt_lengths


class ReplyObjective(Objective[ReplyForward[Any]]):
    """Forward pass and scores of both objectives."""

    def forward(self, module: HeadedLM, rows: Texts) -> ReplyForward[Any]:
        return ReplyForward(module, rows)

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        return Scores(reply_logprobs=self.forward(module, rows).logprobs)


@dataclass(frozen=True)
class PairPreference(Component[ReplyForward[PairBatch[Tensor]]]):
    """The loss of each pair of replies to one prompt."""

    config: DPOConfig
    counted = "rows"
    logged = "loss"

    def terms(self, forward: ReplyForward[PairBatch[Tensor]], totals: StepTotals) -> Terms:
        rows, logprobs = forward.rows, forward.logprobs
        reference = torch.cat([rows.ref_chosen, rows.ref_rejected]) if "ref_chosen" in rows else None
        losses, stats = self.of_pairs(logprobs, reference, forward.num_tokens)
        of_chosen, of_rejected = logprobs.detach().chunk(2)
        stats |= {"chosen_logprobs": of_chosen, "rejected_logprobs": of_rejected}
        return Terms(losses, sums={name: values.sum() for name, values in stats.items()})

    def of_pairs(
        self, logprobs: Tensor, reference: Tensor | None, num_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the loss of each pair [P]; `correct` and `margin` of each, detached).

        Args:
            logprobs, reference: of whole replies [2P], all chosen ones first.
            num_tokens: of the replies [2P].
        """
        config = self.config
        chosen, rejected = implicit_rewards(logprobs, reference, num_tokens, config.loss, config.beta).chunk(2)
        smoothing, gamma = config.label_smoothing, config.gamma
        losses = pair_losses(chosen, rejected, config.loss, beta=config.beta, label_smoothing=smoothing, gamma=gamma)
        with torch.no_grad():
            return losses, {"correct": wins(chosen, rejected), "margin": chosen - rejected}


@dataclass(frozen=True)
class DPOObjective(ReplyObjective):
    """Pairs of replies to one prompt."""

    config: DPOConfig

    def components(self, module: HeadedLM) -> tuple[PairPreference]:
        return (PairPreference(self.config),)


@dataclass(frozen=True)
class Desirability(Component[ReplyForward[LabelledBatch[Tensor]]]):
    """The loss of each labelled reply; z is of the whole step, the totals' `baseline`."""

    config: KTOConfig
    counted = "rows"
    logged = "loss"

    def terms(self, forward: ReplyForward[LabelledBatch[Tensor]], totals: StepTotals) -> Terms:
        desirable = forward.rows.desirable
        ratios = forward.logprobs - forward.rows.ref_reply_logprobs
        rewards = self.config.beta * ratios.detach()
        sums = {
            "desirable_rewards": (rewards * desirable).sum(),
            "undesirable_rewards": (rewards * ~desirable).sum(),
        }
        return Terms(self.of_replies(ratios, desirable, totals.baseline), sums=sums)

    def of_replies(self, log_ratios: Tensor, desirable: Tensor, baseline: float) -> Tensor:
        """The loss of each reply [B], of `kto_losses`."""
        return kto_losses(
            log_ratios,
            desirable,
            baseline,
            beta=self.config.beta,
            desirable_weight=self.config.desirable_weight,
            undesirable_weight=self.config.undesirable_weight,
        )


@dataclass(frozen=True)
class KTOObjective(ReplyObjective):
    """Single replies."""

    config: KTOConfig

    def components(self, module: HeadedLM) -> tuple[Desirability]:
        return (Desirability(self.config),)
