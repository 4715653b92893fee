"""The objective of a reward model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xray_runtime.algorithms.pairwise import pairwise_loss
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Tensors, sequences


@dataclass(frozen=True)
class RewardObjective:
    """One number a reply, read at its last token; trained on pairs (`chosen_*` and `rejected_*` columns)."""

    def score(self, module: HeadedLM, rows: Tensors) -> Tensors:
        hidden = module.hidden(rows["input_ids"], rows.get("trunk"))
        last = hidden[torch.arange(len(hidden), device=hidden.device), rows["lengths"] - 1]
        return {"scores": module.scalars(last)}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        both = {
            "input_ids": sequences(rows),
            "lengths": torch.cat([rows["lengths"], rows["rejected_lengths"]]),
        }
        if "trunk" in rows:
            both["trunk"] = rows["trunk"]
        chosen, rejected = self.score(module, both)["scores"].chunk(2)
        loss, correct = pairwise_loss(chosen, rejected)
        return loss / totals["rows"], {"loss": loss.detach(), "correct": correct}
