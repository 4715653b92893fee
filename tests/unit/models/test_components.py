"""A component that is added to a loss as CONTRIBUTING.md says, against the library's own logits in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.unit.models.tensors import PAIRS, batch, gradients, reply_logprobs, rollout, select
from xray_runtime.data.batch import StepTotals
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PolicyComponent, PolicyForward, PPOObjective
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import CrossEntropy, Forward, Objective, ReferenceObjective, Terms, training_loss

EXACT = {"rtol": 1e-10, "atol": 1e-10}
CONFIG = PPOStageConfig()
TOTALS = StepTotals(tokens=10.0, rows=4.0)


@dataclass(frozen=True)
class PositiveExamples(PolicyComponent):
    """−log p of the tokens of replies with a positive advantage (Yue et al. 2025)."""

    weight: float = 0.1
    logged = "positive_loss"

    def coef(self, totals: StepTotals) -> float:
        return self.weight

    def terms(self, forward: PolicyForward, totals: StepTotals) -> Terms:
        return Terms(-forward.logprobs, forward.share * (forward.rows.advantages.values > 0))


@dataclass(frozen=True)
class WithPositiveExamples(PPOObjective):
    weight: float = 0.1

    def components(self, module: HeadedLM) -> Any:
        return (*super().components(module), PositiveExamples(self.config, self.weight))


@dataclass(frozen=True)
class PerTurn(CrossEntropy):
    """Cross-entropy as a mean over turns."""

    weight: float
    counted = "turns"

    def coef(self, totals: StepTotals) -> float:
        return self.weight


@dataclass(frozen=True)
class Counted(Objective[Forward[Any]]):
    coef: float = 1.0

    def components(self, module: HeadedLM) -> Any:
        return (PerTurn(self.coef),)


def test_a_component_adds_its_own_mean(make_lm: Callable[[int], Any], as_rows: Callable[..., Any]) -> None:
    lm = make_lm(1)
    module, rows = HeadedLM(lm), rollout(as_rows(PAIRS), seed=1)
    plain, sums = training_loss(module, PPOObjective(CONFIG), batch(rows), TOTALS)
    loss, more = training_loss(module, WithPositiveExamples(CONFIG), batch(rows), TOTALS)
    each = torch.cat([reply_logprobs(lm, prompt, reply) for prompt, reply in PAIRS])
    expected = -each[rows["advantages"] > 0].sum()
    assert 0 < (rows["advantages"] > 0).sum() < 10
    torch.testing.assert_close(loss, plain + 0.1 * expected / 10, **EXACT)
    torch.testing.assert_close(more, sums | {"positive_loss": expected.detach()}, **EXACT)
    # Its count is of the whole step: micro-batches add up.
    parts = [
        training_loss(module, WithPositiveExamples(CONFIG), batch(select(rows, m)), TOTALS).loss
        for m in ([2, 0], [1, 3])
    ]
    torch.testing.assert_close(parts[0] + parts[1], loss, **EXACT)


def test_a_component_with_coefficient_0_is_only_logged(
    make_lm: Callable[[int], Any], as_rows: Callable[..., Any]
) -> None:
    module, rows = HeadedLM(make_lm(1)), rollout(as_rows(PAIRS), seed=1)
    plain = gradients(module, training_loss(module, PPOObjective(CONFIG), batch(rows), TOTALS).loss)
    found = training_loss(module, WithPositiveExamples(CONFIG, weight=0.0), batch(rows), TOTALS)
    assert float(found.sums["positive_loss"]) > 0
    torch.testing.assert_close(gradients(module, found.loss), plain, rtol=0, atol=0)


def test_a_component_may_have_a_count_of_its_own(make_lm: Callable[[int], Any], as_rows: Callable[..., Any]) -> None:
    module, rows = HeadedLM(make_lm(1)), batch(rollout(as_rows(PAIRS), seed=1))
    objective = Counted()
    found = [
        training_loss(module, objective, rows, replace(TOTALS, counts=counts)).loss
        for counts in ({"turns": 4.0}, {"turns": 8.0}, {})
    ]
    torch.testing.assert_close(found[0], 2 * found[1], **EXACT)
    assert found[2].isnan()  # nobody gave it: engines skip the step


def test_a_loss_without_any_coefficient_is_refused(make_lm: Callable[[int], Any], as_rows: Callable[..., Any]) -> None:
    rows = batch(rollout(as_rows(PAIRS), seed=1))
    with pytest.raises(ValueError, match="Counted: the coefficient of every component of its loss is 0"):
        training_loss(HeadedLM(make_lm(1)), Counted(coef=0.0), rows, TOTALS)


def test_a_model_that_only_scores_has_no_loss(make_lm: Callable[[int], Any], as_rows: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="ReferenceObjective has no loss"):
        training_loss(HeadedLM(make_lm(1)), ReferenceObjective(1.0), batch(as_rows(PAIRS)), TOTALS)
