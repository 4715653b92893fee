"""How likely given continuations are, and whether greedy decoding would give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xray_runtime.data.batch import Scores
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Forward, Objective, Texts, last_hidden, reply_sums, response_positions
from xray_runtime.models.sequence_parallel import States, each_where_it_is

CHUNK = 1024
"""Positions whose logits are held at a time."""


@dataclass(frozen=True)
class LikelihoodObjective(Objective[Forward[Texts]]):
    """For each row's response: `loglikelihood` [B], the sum of its tokens' log-probabilities in nats, and `greedy` [B]:
    1 where each of its tokens is the likeliest one, else 0."""

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        hidden, at = last_hidden(module, rows), response_positions(rows)
        targets = rows.input_ids.values[at]
        states = hidden[at - 1]
        logprobs, _ = module.logprobs(states, targets, 1.0)
        others = _likeliest(module, states) != targets
        return Scores(
            loglikelihood=reply_sums(logprobs.double(), rows).float(),
            greedy=(reply_sums(others.double(), rows) == 0).float(),
        )


def _likeliest(module: HeadedLM, hidden: States) -> Tensor:
    """The likeliest token [N] after each of the hidden states [N, H]."""
    vocab_size = module.lm.config.get_text_config().vocab_size

    def likeliest(logits: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        return torch.cat([logits(part)[:, :vocab_size].argmax(-1) for part in states.split(CHUNK)])

    return each_where_it_is(lambda own: module.in_chunks(likeliest, own), hidden)
