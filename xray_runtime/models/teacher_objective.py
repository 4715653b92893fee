"""A frozen teacher: what it gives the tokens that a student sampled, and which tokens it finds likeliest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xray_runtime.algorithms.distillation import likeliest
from xray_runtime.data.batch import Scores
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import (
    Forward,
    Objective,
    Texts,
    last_hidden,
    of_responses,
    response_logprobs,
    response_positions,
)
from xray_runtime.models.sequence_parallel import States, each_where_it_is


def with_likeliest(
    module: HeadedLM, hidden: States, rows: Texts, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of each response token and then of other tokens `ids` [R, k] in its place [R, 1 + k],
    entropy [R])."""
    at = response_positions(rows)
    wanted = torch.cat([rows.input_ids.values[at][:, None], ids.long()], 1)
    return module.logprobs(hidden[at - 1], wanted, temperature)


@dataclass(frozen=True)
class TeacherObjective(Objective[Forward[Any]]):
    """Log-probabilities at the student's temperature."""

    temperature: float
    top_k: int = 0
    """Likeliest tokens at each place to score too."""
    num_tokens: int = 0
    """Size of the student's vocabulary."""

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        hidden = last_hidden(module, rows)
        if not self.top_k:
            logprobs, _ = response_logprobs(module, hidden, rows, self.temperature)
            return Scores(teacher_logprobs=of_responses(logprobs, rows))
        at, vocab_size = response_positions(rows), module.lm.config.get_text_config().vocab_size
        shared = min(self.num_tokens, vocab_size)
        sizes: dict[str, int] = {"num_tokens": shared, "vocab_size": vocab_size}

        def compute(own: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            count = min(self.top_k, shared)
            return module.in_chunks(
                lambda logits, states: likeliest(logits, states, ids, self.temperature, count, **sizes), own
            )

        logprobs, chosen, values = each_where_it_is(compute, hidden[at - 1], rows.input_ids.values[at])
        return Scores(
            teacher_logprobs=of_responses(logprobs, rows),
            teacher_topk_ids=of_responses(chosen.to(torch.int32), rows),
            teacher_topk_logprobs=of_responses(values, rows),
        )
