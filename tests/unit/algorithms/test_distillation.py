"""Divergences to a teacher: literals, limits, exact enumeration, and finite differences, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from xray_runtime.algorithms.distillation import generalized_jsd, likeliest, teacher_advantages

P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)
"""The student's and the teacher's distributions."""
REVERSE = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.6)  # KL(P ‖ Q) = .3600642
FORWARD = 0.2 * math.log(0.2 / 0.5) + 0.2 * math.log(0.2 / 0.3) + 0.6 * math.log(0.6 / 0.2)  # KL(Q ‖ P) = .3948171


def logs(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def jsd(p: Tensor, q: Tensor, beta: float, *, whole: bool = True) -> Tensor:
    return generalized_jsd(p, q, beta, whole=whole)


def test_both_ends_are_the_divergences_by_hand() -> None:
    assert jsd(logs(P), logs(Q), 0.0).item() == pytest.approx(FORWARD, abs=1e-12)
    assert jsd(logs(P), logs(Q), 1.0).item() == pytest.approx(REVERSE, abs=1e-12)
    # β = .5: M = (.35, .25, .4).
    to_teacher = 0.2 * math.log(0.2 / 0.35) + 0.2 * math.log(0.2 / 0.25) + 0.6 * math.log(0.6 / 0.4)
    to_student = 0.5 * math.log(0.5 / 0.35) + 0.3 * math.log(0.3 / 0.25) + 0.2 * math.log(0.2 / 0.4)
    assert jsd(logs(P), logs(Q), 0.5).item() == pytest.approx((to_teacher + to_student) / 2, abs=1e-12)


@pytest.mark.parametrize("beta", [1e-6, 1 - 1e-6])
def test_it_approaches_both_ends(beta: float) -> None:
    """Relative to β and to 1 − β; what is left is of the order of 1e-6."""
    share, end = (beta, FORWARD) if beta < 0.5 else (1 - beta, REVERSE)
    assert (jsd(logs(P), logs(Q), beta) / share).item() == pytest.approx(end, abs=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_it_is_symmetric_bounded_and_never_negative(beta: float) -> None:
    p, q = torch.randn(2, 200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    found = jsd(p, q, beta)
    assert (found >= 0).all()
    torch.testing.assert_close(found, jsd(q, p, 1 - beta), rtol=0, atol=1e-12)
    if 0 < beta < 1:
        # The entropy of a coin that shows heads with probability β: its largest value, of disjoint distributions.
        most = -(beta * math.log(beta) + (1 - beta) * math.log(1 - beta))
        assert (found <= most).all()
        apart = torch.tensor([[0.0, -200.0], [-200.0, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(
            jsd(apart, apart.flip(-1), beta), torch.full((2,), most, dtype=torch.float64), atol=1e-12, rtol=0
        )


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_teacher_that_is_the_student_gives_exactly_0(beta: float, whole: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(50, 40, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    logprobs = logits.log_softmax(-1)
    given = logprobs if whole else logprobs.topk(7).values
    found = jsd(given, given.detach(), beta, whole=whole)
    assert (found == 0).all()
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    # At both ends not a bit; between them the mixture rounds.
    assert gradient.abs().max() <= (torch.finfo(dtype).eps if beta == 0.3 else 0)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("whole", [True, False])
def test_the_gradient_is_that_of_finite_differences(beta: float, whole: bool) -> None:
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 6, dtype=torch.float64, generator=random).requires_grad_()
    teacher = torch.randn(4, 6, dtype=torch.float64, generator=random).log_softmax(-1)
    chosen = teacher.topk(6 if whole else 3).indices

    def found(logits: Tensor) -> Tensor:
        return jsd(logits.log_softmax(-1).gather(-1, chosen), teacher.gather(-1, chosen), beta, whole=whole)

    assert torch.autograd.gradcheck(found, (logits,))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_rest_as_one_event_can_only_lose(beta: float) -> None:
    """By hand at β = 1: of P and Q the first alone, against (.5, .5) and (.2, .8)."""
    first = jsd(logs(P)[:, :1], logs(Q)[:, :1], beta, whole=False)
    if beta == 1.0:
        assert first.item() == pytest.approx(0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8), abs=1e-12)
    assert 0 < first.item() < jsd(logs(P), logs(Q), beta).item()
    # Where only one token is left out, nothing is lost.
    two = jsd(logs(P)[:, :2], logs(Q)[:, :2], beta, whole=False)
    torch.testing.assert_close(two, jsd(logs(P), logs(Q), beta), rtol=0, atol=1e-12)


def test_unlikely_tokens_keep_their_gradients() -> None:
    """A student that gives e^-60 to what the teacher wants: −(q − p) of the forward KL, and nothing overflows."""
    logits = torch.tensor([[0.0, -60.0]], requires_grad=True)
    for beta in (0.0, 0.5, 1.0):
        found = jsd(logits.log_softmax(-1), torch.tensor([[-60.0, 0.0]]), beta)
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        assert found.isfinite().all()
        assert gradient.isfinite().all()
        if beta == 0.0:
            torch.testing.assert_close(gradient, torch.tensor([[1.0, -1.0]]))


@pytest.mark.parametrize("sampler", [P, (0.25, 0.25, 0.5)])
def test_the_expected_gradient_at_samples_is_that_of_the_reverse_kl(sampler: tuple[float, ...]) -> None:
    """All tokens, each with the probability of its sampler: by the student itself, and by another one whose ratio
    weights the gradient."""
    logits = logs(P).squeeze(0).requires_grad_()
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - logs(Q))).sum(), logits, retain_graph=True)
    advantages = teacher_advantages(logprobs.detach(), logs(Q).squeeze(0), torch.ones(3))
    ratio = logprobs.detach().exp() / torch.tensor(sampler, dtype=torch.float64)
    loss = (torch.tensor(sampler, dtype=torch.float64) * -(ratio * advantages) * logprobs).sum()
    (expected,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(expected, exact, rtol=0, atol=1e-12)
    # By hand, p_i (log p_i/q_i − KL): .5 × (.9162907 − .3600642).
    assert exact[0].item() == pytest.approx(0.5 * (math.log(2.5) - REVERSE), abs=1e-12)


def test_advantages_by_hand() -> None:
    """−.5 and 1 less their mean, .25; what is masked counts nowhere."""
    found = teacher_advantages(
        torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -9.0]), torch.tensor([1, 1, 0])
    )
    assert found.tolist() == [-0.75, 0.75, 0.0]


@pytest.mark.parametrize("max_logits", [None, 24])
def test_likeliest_tokens_in_chunks(max_logits: int | None) -> None:
    random = torch.Generator().manual_seed(3)
    hidden, layer = torch.randn(11, 5, generator=random), torch.randn(12, 5, generator=random)
    targets = torch.arange(11)
    own, ids, values = likeliest(
        lambda states: states @ layer.T, hidden, targets, 0.7, 3, num_tokens=10, vocab_size=12, max_logits=max_logits
    )
    logp = (hidden @ layer.T / 0.7).log_softmax(-1)
    torch.testing.assert_close(own, logp[torch.arange(11), targets], rtol=1e-6, atol=1e-6)
    # The last two tokens of the teacher's vocabulary are not the student's.
    torch.testing.assert_close(values, logp[:, :10].sort(descending=True).values[:, :3], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(values, logp.gather(-1, ids.long()), rtol=1e-6, atol=1e-6)
