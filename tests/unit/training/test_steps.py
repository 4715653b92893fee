"""Totals and statistics of a step: what objectives really return is what the columns list."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xray_runtime.config.dpo import DPOConfig
from xray_runtime.config.kto import KTOConfig
from xray_runtime.config.ppo import PPOStageConfig
from xray_runtime.data.columns import STATISTICS
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Objective, SFTObjective, Tensors
from xray_runtime.models.ppo_objectives import CriticObjective, PPOObjective
from xray_runtime.models.preference_objectives import DPOObjective, KTOObjective
from xray_runtime.models.reward_objective import RewardObjective
from xray_runtime.training.steps import StepStatistics, StepTotals, read_step

REPLIES = [([5, 9, 7], [42, 11]), ([8, 100], [25, 60, 61])]
REJECTED = [([5, 9, 7], [3]), ([8, 100], [80, 81])]
NUM_TOKENS = 5
PPO = PPOStageConfig()
POLICY = {"policy_loss", "entropy_sum", "clip_count", "dual_clip_count", "approx_kl_sum"}
VALUES = {"value_loss", "value_clip_count"}
RL = StepTotals(tokens=NUM_TOKENS, rows=2, kl_coef=0.1)
OBJECTIVES: dict[str, tuple[Objective, set[str], bool, StepTotals]] = {
    "sft": (SFTObjective(), {"nll"}, False, StepTotals(tokens=NUM_TOKENS)),
    "reward model": (RewardObjective(), {"loss", "correct"}, True, StepTotals(rows=2)),
    "dpo": (
        DPOObjective(DPOConfig()),
        {"loss", "correct", "margin", "chosen_logprobs", "rejected_logprobs"},
        False,
        StepTotals(pairs=2),
    ),
    "kto": (
        KTOObjective(KTOConfig()),
        {"loss", "desirable_rewards", "undesirable_rewards"},
        False,
        StepTotals(rows=2, baseline=0.1),
    ),
    "policy": (PPOObjective(PPO), POLICY, False, RL),
    "policy with a value head": (PPOObjective(PPO), POLICY | VALUES, True, RL),
    "critic": (CriticObjective(PPO), VALUES, True, RL),
}
OF_EVERY_STEP = {"grad_norm", "refused_by", "computed_tokens"}


def rows_of(role: str, as_rows: Callable[..., Tensors]) -> Tensors:
    rows, rejected = as_rows(REPLIES), as_rows(REJECTED)
    if role in ("reward model", "dpo"):
        rows |= {"rejected_ids": rejected["input_ids"], "rejected_lengths": rejected["lengths"]}
    of_rows = {name: torch.tensor([-3.0, -4.0]) for name in ("ref_chosen", "ref_rejected", "ref_logprobs")}
    if role in ("dpo", "kto"):
        return rows | of_rows | {"desirable": torch.tensor([True, False])}
    names = ("old_logprobs", "advantages", "weights", "values", "returns", "ref_logprobs")
    return rows | {name: torch.linspace(-2.0, -1.0, NUM_TOKENS) for name in names}


@pytest.mark.parametrize("role", OBJECTIVES)
def test_objectives_return_the_sums_that_are_named(
    make_lm: Callable[[int], Any], as_rows: Callable[..., Tensors], role: str
) -> None:
    objective, names, head, totals = OBJECTIVES[role]
    module = HeadedLM(make_lm(1), scalar_head=head).double()
    loss, sums = objective.loss(module, rows_of(role, as_rows), totals.to_wire())
    assert loss.isfinite()
    assert sums.keys() == names
    answer = {name: float(value) for name, value in sums.items()}
    read = read_step(answer | {"grad_norm": 1.5})
    assert (read.grad_norm, read.refused_by, read.sums) == (1.5, None, answer)


def test_the_columns_list_the_sums_of_all_objectives() -> None:
    named = set().union(*(names for _, names, _, _ in OBJECTIVES.values()))
    assert {column.name for column in STATISTICS} == named | OF_EVERY_STEP


def test_what_is_not_given_is_not_sent() -> None:
    assert StepTotals(rows=3, baseline=0.0).to_wire() == {"rows": 3.0, "baseline": 0.0}


def test_the_sums_that_are_not_finite_are_named_in_order() -> None:
    answer = {"policy_loss": math.nan, "entropy_sum": 1.0, "clip_count": math.inf, "dual_clip_count": 0.0}
    read = read_step(answer | {"approx_kl_sum": 0.0, "grad_norm": math.nan, "refused_by": 3.0})
    assert [name for name, _ in read.non_finite()] == ["clip_count", "policy_loss"]
    assert read.refused_by == 3
    assert list(StepStatistics({"nll": 1.0}, math.inf).non_finite()) == []


def test_an_answer_without_a_gradient_is_an_error() -> None:
    with pytest.raises(KeyError, match="grad_norm"):
        read_step({"nll": 1.0})
