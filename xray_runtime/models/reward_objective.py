"""The objective of a reward model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from xray_runtime.algorithms.pairwise import pairwise_loss
from xray_runtime.data.batch import PairBatch, Scores
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Tensors, Texts, last_hidden, sequences


@dataclass(frozen=True)
class RewardObjective:
    """One number a reply, read at its last token; trained on pairs: `input_ids` are chosen, `rejected_ids` not."""

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        return Scores(scores=_scores(module, rows))

    def loss(self, module: HeadedLM, rows: PairBatch[Tensor], totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        chosen, rejected = _scores(module, rows).chunk(2)
        loss, correct = pairwise_loss(chosen, rejected)
        return loss / totals["rows"], {"loss": loss.detach(), "correct": correct}


def _scores(module: HeadedLM, rows: Texts) -> Tensor:
    """Scores [B'] of `sequences`."""
    ends = sequences(rows).input_ids.offsets[1:]
    return module.scalars(last_hidden(module, rows)[ends - 1])
