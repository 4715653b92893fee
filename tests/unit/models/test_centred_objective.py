"""Score centering and kept sets in the policy's objective, against the same written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.models.exact import OBJECTIVES, TOTALS, assert_equal_outcomes, headed, outcome, rows_of
from xray_runtime.algorithms.checking import check_loss, loss_reads
from xray_runtime.algorithms.losses import PolicyLossInputs, ppo_loss
from xray_runtime.algorithms.score_centering import score_centering
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.functions import Functions
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.objectives import training_loss

WHOLE, SPLIT = [list(range(7))], [[0, 2, 6], [4, 1, 5], [3]]
FIELDS: dict[str, Any] = {"top_p": 0.9, "entropy_coef": 0.1}


def own(tokens: PolicyLossInputs) -> Tensor:
    """The loss of the config's `score_centering`, as a loss of one's own."""
    centering = score_centering(tokens.topk_policy_logprobs, tokens.topk_logprobs, mode="truncate", cap=2.0)
    return ppo_loss(tokens).loss + tokens.advantages * centering


def test_a_loss_of_your_own_may_center_too() -> None:
    """Its streams are what the built-in component reads, and their gradient reaches the weights."""
    assert loss_reads(own) == {"old_logprobs", "topk_logprobs", "topk_policy_logprobs"}
    check_loss(own)
    assert Functions.of(PPOStageConfig(**FIELDS), loss=own).read_top
    assert not Functions.of(PPOStageConfig(score_centering=True)).read_top
    built_in, module = OBJECTIVES["centred"](), headed()
    rows = rows_of(built_in)
    rows = rows.with_columns(weights=rows.weights.like(np.ones_like(rows.weights.values)))  # type: ignore[attr-defined]
    expected = outcome(module, built_in, rows, WHOLE, shared=False)
    found = outcome(module, PPOObjective(PPOStageConfig(**FIELDS), own), rows, SPLIT, shared=True)
    assert_equal_outcomes(found, expected)
    plain = outcome(module, PPOObjective(PPOStageConfig(**FIELDS)), rows, WHOLE, shared=False)
    assert abs(plain[0] - expected[0]) > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_kept_set(temperature: float) -> None:
    """Of the model's own logits at each place, left to the tokens of the set."""
    module = headed()
    objective = PPOObjective(PPOStageConfig(score_centering=True, temperature=temperature, **FIELDS))
    rows = rows_of(objective)
    forward = objective.forward(module, as_tensors(rows))
    scores = objective.score(module, as_tensors(rows))
    counts, ids = rows.kept_counts.values, rows.kept_ids.values
    sets, place = np.split(ids, counts.cumsum()[:-1]), 0
    with torch.no_grad():
        for text, length in zip(rows.input_ids, rows.prompt_lengths.tolist(), strict=True):
            logits = module.lm(input_ids=torch.from_numpy(text)[None]).logits[0] / temperature
            for at in range(length, len(text)):
                whole, kept = torch.softmax(logits[at - 1], -1), torch.from_numpy(sets[place]).long()
                mass = whole[kept].sum()
                p = whole / mass
                torch.testing.assert_close(forward.logprobs[place].exp(), p[text[at]], rtol=1e-10, atol=0)
                entropy = -(p[kept] * p[kept].log()).sum()
                torch.testing.assert_close(forward.entropy[place], entropy, rtol=1e-10, atol=1e-14)
                torch.testing.assert_close(scores.kept_mass.values[place], mass, rtol=1e-10, atol=0)
                top = torch.from_numpy(rows.topk_ids.values[place]).long()  # type: ignore[attr-defined]
                of_top = torch.where(top >= 0, p[top.clamp(min=0)], 0.0)
                torch.testing.assert_close(forward.of_candidates["topk_ids"][place].exp(), of_top, rtol=1e-10, atol=0)
                place += 1
    assert place == len(counts)


def test_tokens_outside_the_set_have_no_gradient() -> None:
    """The output layer's rows of ids that are in no set stay as they are."""
    module = headed()
    objective = PPOObjective(PPOStageConfig(**FIELDS))
    rows = rows_of(OBJECTIVES["centred"]()).with_columns(topk_ids=None, topk_logprobs=None)
    training_loss(module, objective, as_tensors(rows), TOTALS).loss.backward()
    gradient = module.lm.get_output_embeddings().weight.grad
    inside = np.unique(rows.kept_ids.values)
    outside = np.setdiff1d(np.arange(len(gradient)), inside)
    assert gradient[inside].abs().max() > 1e-6
    assert gradient[outside].abs().max() < 1e-15
