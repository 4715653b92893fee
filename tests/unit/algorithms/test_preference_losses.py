"""Losses of pairs and of single replies against closed forms in float64, and what must not change them.

One pair throughout: log π = −10 and −12, log π_ref = −11 and −11.5, 5 and 10 tokens; so h = 1 − (−0.5) = 1.5 in sums
and 0.2 − (−0.05) = 0.25 in means.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from xray_runtime.algorithms.groups import group_advantages
from xray_runtime.algorithms.preference_losses import PairLoss, implicit_rewards, kto_baseline, kto_losses, pair_losses

LOSSES: list[PairLoss] = ["sigmoid", "sigmoid_norm", "ipo", "hinge", "simpo"]
EXACT = {"abs": 5e-8}
"""The closed forms are written with seven digits."""


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOGPROBS, REFERENCE, LENGTHS = numbers(-10, -12), numbers(-11, -11.5), numbers(5, 10)


def loss_of(
    loss: PairLoss,
    logprobs: Tensor = LOGPROBS,
    reference: Tensor | None = REFERENCE,
    lengths: Tensor = LENGTHS,
    beta: float = 0.1,
    **options: float,
) -> tuple[Tensor, Tensor]:
    """(loss of each pair, gradient by the log-probabilities): chosen replies first, then rejected ones."""
    logprobs = logprobs.clone().requires_grad_()
    chosen, rejected = implicit_rewards(logprobs, reference, lengths, loss, beta).chunk(2)
    losses = pair_losses(chosen, rejected, loss, beta=beta, **options)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.detach(), gradient


@pytest.mark.parametrize(
    ("loss", "options", "expected", "by_chosen"),
    [
        ("sigmoid", {}, 0.6209570, -0.0462570),
        ("sigmoid", {"label_smoothing": 0.1}, 0.6359570, -0.0362570),
        ("sigmoid_norm", {}, 0.6807253, -0.0098750),
        # Means: (0.25 − 5)² and 2 · (0.25 − 5) / 5. Over sums it would be (1.5 − 5)² = 12.25.
        ("ipo", {}, 22.5625, -1.9),
        # 1 − 0.15, and −β.
        ("hinge", {}, 0.85, -0.1),
        # 2 · (−2 + 1.2) − 1 = −2.6.
        ("simpo", {"beta": 2.0, "gamma": 1.0, "reference": None}, 2.6716447, -0.3723446),
        # Without a reference h = 2.
        ("sigmoid", {"reference": None}, 0.5981389, -0.0450166),
    ],
)
def test_closed_forms(loss: PairLoss, options: dict[str, float], expected: float, by_chosen: float) -> None:
    losses, gradient = loss_of(loss, **options)  # type: ignore[arg-type]
    assert losses.tolist() == pytest.approx([expected], **EXACT)
    # A mean over 10 tokens moves half as much with the rejected reply's sum as one over 5 with the chosen one's.
    by_length = 0.5 if loss in ("sigmoid_norm", "ipo", "simpo") else 1.0
    assert gradient.tolist() == pytest.approx([by_chosen, -by_chosen * by_length], **EXACT)


def test_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = torch.randn(2, 6, generator=generator, dtype=torch.float64) * 3 - 10
    lengths = torch.arange(3, 9, dtype=torch.float64)
    for loss in LOSSES:

        def summed(x: Tensor, loss: PairLoss = loss) -> Tensor:
            chosen, rejected = implicit_rewards(x, reference, lengths, loss, 0.3).chunk(2)
            return pair_losses(chosen, rejected, loss, beta=0.3, gamma=0.2 if loss == "simpo" else 0.0).sum()

        assert torch.autograd.gradcheck(summed, logprobs.clone().requires_grad_())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pair_of_equal_replies_teaches_nothing(loss: PairLoss) -> None:
    """Both sides are one function of the weights: what one side pushes, the other takes back."""
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    reply = -weight.square() * 9
    chosen, rejected = implicit_rewards(torch.stack([reply, reply]), REFERENCE[:1], LENGTHS[:1], loss, 0.1)
    losses = pair_losses(chosen, rejected, loss, beta=0.1)
    (gradient,) = torch.autograd.grad(losses, weight)
    assert float(gradient) == 0.0


def test_dpo_begins_at_ln_2_as_rloo_does() -> None:
    """At π = π_ref: loss ln 2, and the gradient of a policy gradient with β/2 times RLOO's advantages of [1, 0]."""
    losses, gradient = loss_of("sigmoid", REFERENCE)
    assert float(losses) == math.log(2)
    advantages = group_advantages(numbers(1, 0), torch.zeros(2, dtype=torch.int64), "rloo")
    assert gradient.tolist() == pytest.approx((-0.1 / 2 * advantages).tolist(), abs=1e-15)


def test_ipos_optimum_is_a_gap_of_one_over_two_beta() -> None:
    # Means 5 and 0 above the reference: a gap of 5 = 1 / (2 · 0.1).
    losses, gradient = loss_of("ipo", REFERENCE + numbers(25, 0))
    assert losses.tolist() == pytest.approx([0.0], abs=1e-24)
    assert gradient.tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_smoothing_half_of_the_labels_leaves_no_preference() -> None:
    _, gradient = loss_of("sigmoid", REFERENCE, label_smoothing=0.5)
    assert gradient.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)


def test_without_a_margin_hinge_pushes_and_beyond_it_rests() -> None:
    assert loss_of("hinge", REFERENCE)[0].tolist() == [1.0]
    losses, gradient = loss_of("hinge", REFERENCE + numbers(10.5, 0))
    assert (losses.tolist(), gradient.tolist()) == ([0.0], [0.0, 0.0])


def test_extreme_ratios_stay_finite() -> None:
    for loss in LOSSES:
        losses, gradient = loss_of(loss, numbers(-1e5, -1.0).float(), beta=1.0)
        assert torch.isfinite(losses).all()
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_are_independent_of_order_and_split(loss: PairLoss) -> None:
    generator = torch.Generator().manual_seed(1)
    chosen, rejected = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    whole = pair_losses(chosen, rejected, loss, beta=0.2)
    order = torch.randperm(7, generator=generator)
    torch.testing.assert_close(pair_losses(chosen[order], rejected[order], loss, beta=0.2), whole[order])
    parts = [pair_losses(c, r, loss, beta=0.2) for c, r in zip(chosen.split(3), rejected.split(3), strict=True)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


# KTO


def test_kto_in_closed_form() -> None:
    # λ (1 − σ(±0.1 (r − 0.2))) of r = 1 and r = −0.5.
    ratios = numbers(1, -0.5).requires_grad_()
    losses = kto_losses(ratios, torch.tensor([True, False]), 0.2, beta=0.1)
    (gradient,) = torch.autograd.grad(losses.sum(), ratios)
    assert losses.tolist() == pytest.approx([0.4800107, 0.4825071], **EXACT)
    assert gradient.tolist() == pytest.approx([-0.0249600, 0.0249694], **EXACT)


def test_kto_weighs_each_side() -> None:
    desirable = torch.tensor([True, False])
    plain = kto_losses(numbers(1, -0.5), desirable, 0.2, beta=0.1)
    weighed = kto_losses(numbers(1, -0.5), desirable, 0.2, beta=0.1, desirable_weight=1.5, undesirable_weight=0.5)
    torch.testing.assert_close(weighed, plain * numbers(1.5, 0.5))


def test_ktos_baseline_of_nan_is_nan() -> None:
    assert math.isnan(kto_baseline(torch.tensor([math.nan, 1.0])))


def test_ktos_baseline_is_a_constant_and_never_below_zero() -> None:
    mismatched = numbers(0.5, -0.1, 0.2).requires_grad_()
    assert kto_baseline(mismatched) == pytest.approx(0.2)
    assert kto_baseline(numbers(-1, 0.5)) == 0.0


def test_kto_does_not_depend_on_the_split_with_the_baseline_of_the_whole_step() -> None:
    generator = torch.Generator().manual_seed(2)
    ratios, mismatched = torch.randn(2, 8, generator=generator, dtype=torch.float64) + 0.5
    desirable = torch.arange(8) % 3 == 0
    z = kto_baseline(mismatched)
    whole = kto_losses(ratios, desirable, z, beta=0.5)
    parts = [kto_losses(r, d, z, beta=0.5) for r, d in zip(ratios.split(3), desirable.split(3), strict=True)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
    # The wrong way: of each part's own mismatches. It differs, which shows that this test would notice.
    own = [
        kto_losses(r, d, kto_baseline(m), beta=0.5)
        for r, d, m in zip(ratios.split(3), desirable.split(3), mismatched.split(3), strict=True)
    ]
    assert float((torch.cat(own) - whole).abs().max()) > 1e-3


def test_simpo_without_a_margin_is_the_sigmoid_of_the_difference() -> None:
    rewards = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0])
    torch.testing.assert_close(pair_losses(*rewards, "simpo", beta=1.0), pair_losses(*rewards, "sigmoid", beta=1.0))
