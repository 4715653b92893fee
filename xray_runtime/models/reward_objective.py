"""The objective of a reward model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from xray_runtime.algorithms.pairwise import pairwise_loss
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Scores, Tensors, last_hidden, sequences


@dataclass(frozen=True)
class RewardObjective:
    """One number a reply, read at its last token; trained on pairs: `input_ids` are chosen, `rejected_ids` not."""

    def score(self, module: HeadedLM, rows: Tensors) -> Scores:
        return {"scores": _scores(module, rows)}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        chosen, rejected = _scores(module, rows).chunk(2)
        loss, correct = pairwise_loss(chosen, rejected)
        return loss / totals["rows"], {"loss": loss.detach(), "correct": correct}


def _scores(module: HeadedLM, rows: Tensors) -> Tensor:
    """Scores [B'] of `sequences`."""
    _, lengths = sequences(rows)
    return module.scalars(last_hidden(module, rows)[lengths.cumsum(0) - 1])
