"""The objectives of policies that learn from labelled replies: pairs (DPO and its kin), and single ones (KTO).

`score` of either gives `reply_logprobs`, the log-probability of each whole reply [B]: the same passes make the
reference's, before training. A `PairBatch` has no `ref_chosen` and `ref_rejected` where the loss has no reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xray_runtime.algorithms.preference_losses import implicit_rewards, kto_losses, pair_losses
from xray_runtime.algorithms.statistics import wins
from xray_runtime.data.batch import LabelledBatch, PairBatch, Scores
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Tensors, Texts, by_row, last_hidden, response_logprobs, sequences

if TYPE_CHECKING:
    from xray_runtime.methods.dpo.config import DPOConfig
    from xray_runtime.methods.kto.config import KTOConfig


@dataclass(frozen=True)
class DPOObjective:
    """Pairs of replies to one prompt; `loss` needs `pairs` in `totals`."""

    config: DPOConfig

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        return Scores(reply_logprobs=_reply_logprobs(module, rows)[0])

    def loss(self, module: HeadedLM, rows: PairBatch[Tensor], totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        logprobs, num_tokens = _reply_logprobs(module, rows)
        reference = torch.cat([rows.ref_chosen, rows.ref_rejected]) if "ref_chosen" in rows else None
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

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        return Scores(reply_logprobs=_reply_logprobs(module, rows)[0])

    def loss(self, module: HeadedLM, rows: LabelledBatch[Tensor], totals: dict[str, float]) -> tuple[Tensor, Tensors]:
        desirable = rows.desirable
        ratios = _reply_logprobs(module, rows)[0] - rows.ref_reply_logprobs
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


def _reply_logprobs(module: HeadedLM, rows: Texts) -> tuple[Tensor, Tensor]:
    """(log-probability, number of tokens) of each reply [B'], of a pair's rows all chosen ones first."""
    texts = sequences(rows)
    logprobs, _ = response_logprobs(module, last_hidden(module, rows), texts, 1.0)
    sums = torch.stack([reply.sum() for reply in by_row(logprobs, texts)])
    return sums, texts.input_ids.lengths - texts.prompt_lengths
