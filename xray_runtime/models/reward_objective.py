"""The objective of a reward model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xray_runtime.algorithms.pairwise import pairwise_losses
from xray_runtime.data.batch import PairBatch, Scores, StepTotals
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Component, Forward, Objective, Terms, Texts, sequences


class Preference(Component[Forward[PairBatch[Tensor]]]):
    """−log σ(chosen score − rejected score) of each pair."""

    counted = "rows"
    logged = "loss"

    def terms(self, forward: Forward[PairBatch[Tensor]], totals: StepTotals) -> Terms:
        losses, correct = pairwise_losses(*_scores(forward).chunk(2))
        return Terms(losses, sums={"correct": correct})


@dataclass(frozen=True)
class RewardObjective(Objective[Forward[Any]]):
    """One number a reply, read at its last token; trained on pairs: `input_ids` are chosen, `rejected_ids` not."""

    def components(self, module: HeadedLM) -> tuple[Preference]:
        return (Preference(),)

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        return Scores(scores=_scores(self.forward(module, rows)))


def _scores(forward: Forward[Any]) -> Tensor:
    """Scores [B'] of `sequences`."""
    ends = sequences(forward.rows).input_ids.offsets[1:]
    return forward.module.scalars(forward.hidden[ends - 1])
