"""The objectives of PPO: the policy, with or without a value head, and a critic of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xray_runtime.algorithms.losses import policy_loss, value_loss
from xray_runtime.config.ppo import PPOStageConfig
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Tensors, response_logprobs, response_positions, spread


@dataclass(frozen=True)
class PPOObjective:
    """The policy, with a value head when the critic shares its trunk.

    `score` gives `logprobs`, with a value head `values` and `final_values`, with a reference branch `ref_logprobs`.
    """

    config: PPOStageConfig

    def score(self, module: HeadedLM, rows: Tensors) -> Tensors:
        hidden = module.hidden(rows["input_ids"], rows.get("trunk"))
        logprobs, _ = response_logprobs(module, hidden, rows, self.config.temperature)
        out = {"logprobs": spread(logprobs, rows)}
        if module.scalar is not None:
            out |= _values(module, hidden, rows)
        if module.reference_layers is not None:
            ref_hidden = module.reference_hidden(rows["trunk"])
            ref_logprobs, _ = response_logprobs(module, ref_hidden, rows, self.config.temperature)
            out["ref_logprobs"] = spread(ref_logprobs, rows)
        return out

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        hidden = module.hidden(rows["input_ids"], rows.get("trunk"))
        logprobs, entropy = response_logprobs(module, hidden, rows, self.config.temperature)
        row, t, column, _ = response_positions(rows)
        ones = torch.ones_like(logprobs)
        loss, stats = policy_loss(
            logprobs,
            rows["old_logprobs"][row, t],
            rows["advantages"][row, t],
            ones,
            clip_range=self.config.clip_range,
            dual_clip=self.config.dual_clip,
            weights=rows["weights"][row, t],
        )
        stats |= {"policy_loss": loss.detach(), "entropy_sum": entropy.sum().detach()}
        loss = loss - self.config.entropy_coef * entropy.sum()
        if module.scalar is not None:
            values = module.scalars(hidden[row, column])
            value, value_stats = value_loss(
                values,
                rows["values"][row, t],
                rows["returns"][row, t],
                ones,
                clip_range=self.config.value_clip_range,
            )
            loss = loss + self.config.value_coef * value
            stats |= value_stats | {"value_loss": value.detach()}
        return loss / totals["tokens"], stats


@dataclass(frozen=True)
class CriticObjective:
    """A critic of its own: the value of the state before each response token, and of the state after the last."""

    config: PPOStageConfig

    def score(self, module: HeadedLM, rows: Tensors) -> Tensors:
        return _values(module, module.hidden(rows["input_ids"], rows.get("trunk")), rows)

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        hidden = module.hidden(rows["input_ids"], rows.get("trunk"))
        row, t, column, _ = response_positions(rows)
        values = module.scalars(hidden[row, column])
        loss, stats = value_loss(
            values,
            rows["values"][row, t],
            rows["returns"][row, t],
            torch.ones_like(values),
            clip_range=self.config.value_clip_range,
        )
        return loss / totals["tokens"], stats | {"value_loss": loss.detach()}


def _values(module: HeadedLM, hidden: Tensor, rows: Tensors) -> Tensors:
    row, _, column, _ = response_positions(rows)
    last = hidden[torch.arange(len(hidden), device=hidden.device), rows["lengths"] - 1]
    return {"values": spread(module.scalars(hidden[row, column]), rows), "final_values": module.scalars(last)}
