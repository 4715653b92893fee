"""Objectives of DPO and KTO on a real tiny Llama in float64, against formulas over the library's own logits.

Tolerances are 1e-9 of float64 sums in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.tensors import batch
from xray_runtime.data.batch import StepTotals
from xray_runtime.methods.common.preference_objectives import DPOObjective, KTOObjective
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.kto.config import KTOConfig
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import training_loss

MakeLM = Callable[[int], Any]
AsRows = Callable[..., dict[str, Tensor]]

CHOSEN = [([5, 9, 7], [42, 11, 6, 1]), ([8, 100], [3, 1]), ([20, 21, 22], [25, 1])]
REJECTED = [([5, 9, 7], [17, 1]), ([8, 100], [60, 61, 62, 63, 1]), ([20, 21, 22], [40, 41, 1])]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def of_pairs(as_rows: AsRows, chosen: Any = CHOSEN, rejected: Any = REJECTED) -> dict[str, Tensor]:
    one, other = as_rows(chosen), as_rows(rejected)
    return one | {"rejected_ids": other["input_ids"], "rejected_lengths": other["lengths"]}


def reply_logprob(lm: Any, prompt: list[int], reply: list[int]) -> Tensor:
    logits = lm(input_ids=torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1)[range(len(reply)), reply].sum()


def gradient(module: HeadedLM, loss: Tensor) -> Tensor:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, materialize_grads=True)])


def test_scores_are_log_probabilities_of_whole_replies(make_lm: MakeLM, as_rows: AsRows) -> None:
    lm = make_lm(0)
    module = HeadedLM(lm).double()
    expected = torch.stack([reply_logprob(lm, *pair) for pair in CHOSEN])
    for objective in (DPOObjective(DPOConfig()), KTOObjective(KTOConfig())):
        found = objective.score(module, batch(as_rows(CHOSEN))).reply_logprobs
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected, **EXACT)


def test_dpo_is_its_formula_over_the_librarys_logits(make_lm: MakeLM, as_rows: AsRows) -> None:
    lm, reference = make_lm(0), make_lm(1)
    module = HeadedLM(lm).double()
    with torch.no_grad():
        ref = [torch.stack([reply_logprob(reference, *p) for p in side]) for side in (CHOSEN, REJECTED)]
    rows = of_pairs(as_rows) | {"ref_chosen": ref[0], "ref_rejected": ref[1]}
    loss, stats = training_loss(module, DPOObjective(DPOConfig(beta=0.3)), batch(rows), StepTotals(rows=4.0))
    own = [torch.stack([reply_logprob(lm, *p) for p in side]) for side in (CHOSEN, REJECTED)]
    margin = 0.3 * ((own[0] - ref[0]) - (own[1] - ref[1]))
    expected = torch.log1p(torch.exp(-margin)).sum() / 4
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(gradient(module, loss), gradient(module, expected), **EXACT)
    assert float(stats["correct"]) == int((margin > 0).sum())
    torch.testing.assert_close(stats["margin"], margin.sum().detach(), **EXACT)
    torch.testing.assert_close(stats["chosen_logprobs"], own[0].sum().detach(), **EXACT)
    torch.testing.assert_close(stats["rejected_logprobs"], own[1].sum().detach(), **EXACT)


def test_simpo_needs_no_reference(make_lm: MakeLM, as_rows: AsRows) -> None:
    lm = make_lm(0)
    module = HeadedLM(lm).double()
    loss, _ = training_loss(
        module,
        DPOObjective(DPOConfig(loss="simpo", beta=2.0, gamma=1.0)),
        batch(of_pairs(as_rows)),
        StepTotals(rows=3.0),
    )
    means = [torch.stack([reply_logprob(lm, p, r) / len(r) for p, r in side]) for side in (CHOSEN, REJECTED)]
    expected = torch.log1p(torch.exp(1.0 - 2.0 * (means[0] - means[1]))).mean()
    torch.testing.assert_close(loss, expected, **EXACT)


def test_the_policy_that_is_its_reference_has_a_loss_of_ln_2(make_lm: MakeLM, as_rows: AsRows) -> None:
    module = HeadedLM(make_lm(0)).double()
    objective = DPOObjective(DPOConfig())
    with torch.no_grad():
        ref = [objective.score(module, batch(as_rows(side))).reply_logprobs for side in (CHOSEN, REJECTED)]
    rows = of_pairs(as_rows) | {"ref_chosen": ref[0], "ref_rejected": ref[1]}  # type: ignore[dict-item]
    loss, _ = training_loss(module, objective, batch(rows), StepTotals(rows=3.0))
    assert float(loss.detach()) == pytest.approx(math.log(2), abs=1e-12)


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm", "ipo", "hinge", "simpo"])
def test_equal_replies_move_nothing(make_lm: MakeLM, as_rows: AsRows, loss: Any) -> None:
    module = HeadedLM(make_lm(0)).double()
    zeros = torch.zeros(3, dtype=torch.float64)
    rows = of_pairs(as_rows, CHOSEN, CHOSEN) | {"ref_chosen": zeros, "ref_rejected": zeros}
    value, _ = training_loss(module, DPOObjective(DPOConfig(loss=loss)), batch(rows), StepTotals(rows=3.0))
    assert float(gradient(module, value).abs().max()) < 1e-12


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo"])
def test_the_gradient_of_pairs_does_not_depend_on_order_or_split(make_lm: MakeLM, as_rows: AsRows, loss: Any) -> None:
    module = HeadedLM(make_lm(0)).double()
    objective = DPOObjective(DPOConfig(loss=loss))

    def of(*index: int) -> Tensor:
        at = list(index)
        ref = {"ref_chosen": REFERENCE[0][at], "ref_rejected": REFERENCE[1][at]}
        rows = of_pairs(as_rows, [CHOSEN[i] for i in at], [REJECTED[i] for i in at]) | ref
        return gradient(module, training_loss(module, objective, batch(rows), StepTotals(rows=3.0))[0])

    whole = of(0, 1, 2)
    torch.testing.assert_close(of(2, 0, 1), whole, **EXACT)
    torch.testing.assert_close(of(0, 2) + of(1), whole, **EXACT)
    assert float(whole.abs().max()) > 1e-3


REFERENCE = torch.tensor([[-20.0, -9.0, -12.0], [-11.0, -30.0, -16.0]], dtype=torch.float64)


def test_kto_is_its_formula_and_does_not_depend_on_the_split(make_lm: MakeLM, as_rows: AsRows) -> None:
    lm = make_lm(0)
    module = HeadedLM(lm).double()
    config = KTOConfig(beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    replies, ref = [*CHOSEN, *REJECTED], REFERENCE.flatten()
    desirable = torch.tensor([True, True, False, False, False, True])

    def of(*index: int) -> Tensor:
        at = list(index)
        rows = as_rows([replies[i] for i in at]) | {"ref_reply_logprobs": ref[at], "desirable": desirable[at]}
        return training_loss(module, KTOObjective(config), batch(rows), StepTotals(rows=6.0, baseline=0.7))[0]

    ratios = torch.stack([reply_logprob(lm, *reply) for reply in replies]) - ref
    gain = 0.2 * (ratios - 0.7)
    expected = torch.where(desirable, 1.5 / (1 + torch.exp(gain)), 0.5 / (1 + torch.exp(-gain))).sum() / 6
    whole = of(0, 1, 2, 3, 4, 5)
    torch.testing.assert_close(whole, expected, **EXACT)
    by_formula = gradient(module, expected)
    torch.testing.assert_close(gradient(module, whole), by_formula, **EXACT)
    split = gradient(module, of(5, 0)) + gradient(module, of(1, 2, 3)) + gradient(module, of(4))
    torch.testing.assert_close(split, by_formula, **EXACT)
