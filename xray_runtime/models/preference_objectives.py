"""The objectives of policies that learn from labelled replies: pairs (DPO and its kin), and single ones (KTO).

`score` of either gives `logprobs`, the log-probability of each whole reply [B]: the same passes make the reference's,
before training. Rows of pairs carry, beside `rejected_ids`, the reference's log-probabilities of both replies,
`ref_chosen` and `ref_rejected` [B], absent where the loss has no reference. Rows of single replies carry `ref_logprobs`
and `desirable` [B].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xray_runtime.algorithms.preference_losses import implicit_rewards, kto_losses, pair_losses
from xray_runtime.algorithms.statistics import wins
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Scores, Tensors, by_row, last_hidden, response_logprobs, sequences

if TYPE_CHECKING:
    from xray_runtime.config.dpo import DPOConfig
    from xray_runtime.config.kto import KTOConfig


@dataclass(frozen=True)
class DPOObjective:
    """Pairs of replies to one prompt; `loss` needs `pairs` in `totals`."""

    config: DPOConfig

    def score(self, module: HeadedLM, rows: Tensors) -> Scores:
        return {"logprobs": _reply_logprobs(module, rows)[0]}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        logprobs, num_tokens = _reply_logprobs(module, rows)
        reference = torch.cat([rows["ref_chosen"], rows["ref_rejected"]]) if "ref_chosen" in rows else None
        losses, stats = self.of_pairs(logprobs, reference, num_tokens)
        of_chosen, of_rejected = logprobs.detach().chunk(2)
        stats |= {"chosen_logprobs": of_chosen, "rejected_logprobs": of_rejected}
        return losses.sum() / totals["pairs"], {name: values.sum() for name, values in stats.items()}

    def of_pairs(
        self, logprobs: Tensor, reference: Tensor | None, num_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the loss of each pair [P]; `loss`, `correct` and `margin` of each, detached).

        Args:
            logprobs, reference: of whole replies [2P], all chosen ones first.
            num_tokens: of the replies [2P].
        """
        config = self.config
        chosen, rejected = implicit_rewards(logprobs, reference, num_tokens, config.loss, config.beta).chunk(2)
        smoothing, gamma = config.label_smoothing, config.gamma
        losses = pair_losses(chosen, rejected, config.loss, beta=config.beta, label_smoothing=smoothing, gamma=gamma)
        with torch.no_grad():
            stats = {"loss": losses.detach(), "correct": wins(chosen, rejected), "margin": chosen - rejected}
        return losses, stats


@dataclass(frozen=True)
class KTOObjective:
    """Single replies; `loss` needs `rows` and `baseline`, z of the whole step, in `totals`."""

    config: KTOConfig

    def score(self, module: HeadedLM, rows: Tensors) -> Scores:
        return {"logprobs": _reply_logprobs(module, rows)[0]}

    def loss(self, module: HeadedLM, rows: Tensors, totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        desirable = rows["desirable"]
        ratios = _reply_logprobs(module, rows)[0] - rows["ref_logprobs"]
        loss = self.of_replies(ratios, desirable, totals["baseline"]).sum()
        rewards = self.config.beta * ratios.detach()
        stats = {
            "loss": loss.detach(),
            "desirable_rewards": (rewards * desirable).sum(),
            "undesirable_rewards": (rewards * ~desirable).sum(),
        }
        return loss / totals["rows"], stats

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


def _reply_logprobs(module: HeadedLM, rows: Tensors) -> tuple[Tensor, Tensor]:
    """(log-probability, number of tokens) of each reply [B'], of a pair's rows all chosen ones first."""
    hidden = last_hidden(module, rows)
    ids, lengths = sequences(rows)
    prompts = rows["prompt_lengths"].repeat(len(lengths) // len(rows["prompt_lengths"]))
    flat: Tensors = {"input_ids": ids, "lengths": lengths, "prompt_lengths": prompts}
    logprobs, _ = response_logprobs(module, hidden, flat, 1.0)
    return torch.stack([reply.sum() for reply in by_row(logprobs, flat)]), lengths - prompts
