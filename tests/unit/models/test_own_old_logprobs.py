"""A first step that computes its own old log-probabilities, against one that is given them: float64, to 1e-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.tensors import batch
from xray_runtime.algorithms.importance import importance_weights
from xray_runtime.data.batch import StepTotals
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.methods.ppo.step_scores import StepScored
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import by_row, training_loss

PAIRS = [([5, 9, 7], [42, 11, 6, 1]), ([8, 100], [3]), ([20, 21, 22, 23, 24], [25, 1]), ([5, 9, 7], [60, 61, 62])]
NUM_TOKENS = 10
EXACT = {"rtol": 0.0, "atol": 1e-12}
TOTALS = StepTotals(tokens=9.0, rows=4.0, kl_coef=0.2)


def gradients(module: HeadedLM, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def columns(seed: int) -> dict[str, Tensor]:
    noise = torch.randn(3, NUM_TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    read = torch.ones(NUM_TOKENS, dtype=torch.bool)
    read[1] = False  # the policy only read it
    # About the log of one token among 280, far enough apart for some ratios to exceed the cap.
    found = {"rollout_logprobs": noise[0] * 0.8 - 5.7, "ref_logprobs": noise[1] * 0.5 - 5.7}
    return found | {"advantages": noise[2], "response_mask": read}


def padded(flat: Tensor, rows: dict[str, Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(by_row(flat, batch(rows)), batch_first=True)


@pytest.mark.parametrize(
    ("method", "correction", "level"),
    [
        *(("grpo", correction, level) for correction in ("truncate", "mask", "none") for level in ("token", "reply")),
        *((method, "truncate", "token") for method in ("dapo", "gspo", "cispo", "reinforce++_baseline")),
    ],
)
def test_loss_gradients_and_weights_are_those_of_scoring_beforehand(
    make_lm: Any, as_rows: Any, method: str, correction: str, level: str
) -> None:
    lm = make_lm(1)
    module, rows = HeadedLM(lm).double(), as_rows(PAIRS) | columns(3)
    given = {"method": method, "importance_correction": correction, "importance_level": level, "importance_cap": 1.2}
    config = PPOStageConfig(**given)  # type: ignore[arg-type]
    objective = StepScored(PPOObjective(config))

    with torch.no_grad():
        scored = objective.score(module, batch(rows)).logprobs.values  # type: ignore[arg-type]
    mask, valid = padded(rows["response_mask"], rows), padded(torch.ones(NUM_TOKENS, dtype=torch.bool), rows)
    both = padded(scored, rows), padded(rows["rollout_logprobs"], rows)
    weights, stats = importance_weights(*both, mask, mode=correction, cap=1.2, level=level)  # type: ignore[arg-type]
    assert stats["capped_share"] > 0
    expected, expected_stats, _ = training_loss(
        module, objective, batch(rows | {"old_logprobs": scored, "weights": weights[valid]}), TOTALS
    )
    wanted = gradients(module, expected)

    loss, found, given_back = training_loss(module, objective, batch(rows), TOTALS)
    torch.testing.assert_close(given_back.old_logprobs.values, scored, **EXACT)
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(found, expected_stats, **EXACT)
    assert found["clip_count"] == found["approx_kl_sum"] == 0  # the ratio is exactly 1
    ours = gradients(module, loss)
    assert any(gradient.abs().max() > 1e-3 for gradient in ours.values())
    torch.testing.assert_close(ours, wanted, **EXACT)
