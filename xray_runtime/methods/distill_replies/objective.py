"""The divergence from a teacher's distribution at each token of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from xray_runtime.algorithms.distillation import generalized_jsd
from xray_runtime.data.batch import Scores, StepTotals, TaughtBatch
from xray_runtime.models.cached import cached_property
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Component, Forward, Objective, Terms, Texts, reply_sums
from xray_runtime.models.teacher_objective import with_likeliest

if TYPE_CHECKING:
    from xray_runtime.methods.distill_replies.config import DistillRepliesConfig


class TaughtForward(Forward[TaughtBatch[Tensor]]):
    """The tensors that both components read, [R] each."""

    def __init__(self, module: HeadedLM, rows: TaughtBatch[Tensor], config: DistillRepliesConfig) -> None:
        super().__init__(module, rows)
        self._config = config

    @cached_property
    def _predicted(self) -> tuple[Tensor, Tensor]:
        found, _ = with_likeliest(
            self.module, self.hidden, self.rows, self.rows.teacher_topk_ids.values, self._config.temperature
        )
        return found[:, 0], found[:, 1:]

    @property
    def nll(self) -> Tensor:
        return -self._predicted[0]

    @property
    def divergence(self) -> Tensor:
        config, of_teacher = self._config, self.rows.teacher_topk_logprobs.values
        return generalized_jsd(self._predicted[1], of_teacher, config.beta, whole=config.top_k is None)


class Divergence(Component[TaughtForward]):
    """From the teacher."""

    logged = "teacher_divergence"

    def terms(self, forward: TaughtForward, totals: StepTotals) -> Terms:
        return Terms(forward.divergence)


@dataclass(frozen=True)
class ReplyCrossEntropy(Component[TaughtForward]):
    """−log p of the reply's tokens."""

    weight: float
    logged = "nll"

    def coef(self, totals: StepTotals) -> float:
        return self.weight

    def terms(self, forward: TaughtForward, totals: StepTotals) -> Terms:
        return Terms(forward.nll)


@dataclass(frozen=True)
class DistillRepliesObjective(Objective[TaughtForward]):
    """`score` gives the sums of both over each row."""

    config: DistillRepliesConfig

    def components(self, module: HeadedLM) -> Sequence[Component[TaughtForward]]:
        return Divergence(), ReplyCrossEntropy(self.config.nll_coef)

    def forward(self, module: HeadedLM, rows: Texts) -> TaughtForward:
        return TaughtForward(module, cast("TaughtBatch[Tensor]", rows), self.config)

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        forward = self.forward(module, rows)
        nll, apart = (reply_sums(of, rows) for of in (forward.nll, forward.divergence))
        return Scores(nll=nll, teacher_divergence=apart)
