"""Totals and statistics of a step: what objectives really return is what the list of columns names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.models.tensors import batch
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.columns import STATISTICS
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.preference_objectives import DPOObjective, KTOObjective
from xray_runtime.methods.common.training.steps import StepStatistics, read_step
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.kto.config import KTOConfig
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import CriticObjective, PPOObjective
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Objective, SFTObjective, Tensors, training_loss
from xray_runtime.models.reward_objective import RewardObjective

REPLIES = [([5, 9, 7], [42, 11]), ([8, 100], [25, 60, 61])]
REJECTED = [([5, 9, 7], [3]), ([8, 100], [80, 81])]
NUM_TOKENS = 5
PPO = PPOStageConfig()
TOTALS = StepTotals(tokens=NUM_TOKENS, rows=2, kl_coef=0.1, baseline=0.1)
POLICY = {"policy_loss", "entropy_sum", "clip_count", "dual_clip_count", "approx_kl_sum"}
VALUES = {"value_loss", "value_clip_count"}
OBJECTIVES: dict[str, tuple[Objective[Any], bool, set[str]]] = {
    "sft": (SFTObjective(), False, {"nll"}),
    "reward model": (RewardObjective(), True, {"loss", "correct"}),
    "dpo": (DPOObjective(DPOConfig()), False, {"loss", "correct", "margin", "chosen_logprobs", "rejected_logprobs"}),
    "kto": (KTOObjective(KTOConfig()), False, {"loss", "desirable_rewards", "undesirable_rewards"}),
    "policy": (PPOObjective(PPO), False, POLICY),
    "policy with a value head": (PPOObjective(PPO), True, POLICY | VALUES),
    "critic": (CriticObjective(PPO), True, VALUES),
}


def rows_of(role: str, as_rows: Callable[..., Tensors]) -> Tensors:
    rows, rejected = as_rows(REPLIES), as_rows(REJECTED)
    if role in ("reward model", "dpo"):
        rows |= {"rejected_ids": rejected["input_ids"], "rejected_lengths": rejected["lengths"]}
    of_rows = {name: torch.tensor([-3.0, -4.0]) for name in ("ref_chosen", "ref_rejected", "ref_reply_logprobs")}
    if role in ("dpo", "kto"):
        return rows | of_rows | {"desirable": torch.tensor([True, False])}
    names = ("old_logprobs", "advantages", "weights", "values", "returns", "ref_logprobs")
    return rows | {name: torch.linspace(-2.0, -1.0, NUM_TOKENS) for name in names}


@pytest.mark.parametrize("role", OBJECTIVES)
def test_objectives_return_the_sums_that_are_named(
    make_lm: Callable[[int], Any], as_rows: Callable[..., Tensors], role: str
) -> None:
    objective, head, expected = OBJECTIVES[role]
    module = HeadedLM(make_lm(1), scalar_head=head).double()
    loss, sums = training_loss(module, objective, batch(rows_of(role, as_rows)), TOTALS)
    assert loss.isfinite()
    assert sums.keys() == expected
    assert expected <= {column.name for column in STATISTICS}
    numbers = {name: float(value) for name, value in sums.items()}
    assert read_step(numbers | {"grad_norm": 1.5}) == StepStatistics(numbers, 1.5)


def test_a_steps_totals_count_rows_and_the_tokens_of_their_replies() -> None:
    rows = TextBatch.of([[1, 2], [3]], [[4, 5, 6], [7]])
    assert StepTotals.of(rows, baseline=0.5) == StepTotals(tokens=4.0, rows=2.0, baseline=0.5)
    counted = Ragged(np.array([True, False, True, True]), np.array([0, 3, 4]))
    assert StepTotals.of(rows.with_columns(response_mask=counted)).tokens == 3.0


def test_the_sums_that_are_not_finite_are_named_in_order() -> None:
    sums = {"policy_loss": math.nan, "entropy_sum": 1.0, "clip_count": math.inf, "dual_clip_count": 0.0}
    sums |= {"approx_kl_sum": 0.0, "grad_norm": math.nan, "refused_by": 3.0}
    read = read_step(sums)
    assert [name for name, _ in read.non_finite()] == ["clip_count", "policy_loss"]
    assert read.refused_by == 3
    assert list(StepStatistics({"nll": 1.0}, math.inf).non_finite()) == []
