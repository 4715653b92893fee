"""Score centering in float64: literals, the exact expectation over a small vocabulary, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from xray_runtime.algorithms.importance import importance_weights
from xray_runtime.algorithms.score_centering import score_centering

CAP, FLOOR = 1.5, 0.6


def coefficients(p: list[float], q: list[float], **options: Any) -> list[float]:
    """c of each token, the gradient of C by its log-probability."""
    logp = torch.tensor([p], dtype=torch.float64).log().requires_grad_()
    score_centering(logp, torch.tensor([q], dtype=torch.float64).log(), **{"cap": CAP} | options).sum().backward()
    assert logp.grad is not None
    return logp.grad[0].tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # p = (.5, .1), q = (.3, .3) of the head; the rest has .4 of both, so s = 1.
        ({"mode": "none"}, [0.3 - 0.5, 0.3 - 0.1]),
        # clamp(.5, 0, .45) − .5 and clamp(.1, 0, .45) − .1, α = 1.
        ({"mode": "truncate"}, [-0.05, 0.0]),
        # From below too: clamp(.1, .18, .45) − .1.
        ({"mode": "truncate", "floor": FLOOR}, [-0.05, 0.08]),
        # The first is beyond 1.5 · .3, the second is not below 0 · .3, and the rest is inside.
        ({"mode": "mask"}, [-0.5, 0.0]),
        ({"mode": "mask", "floor": FLOOR}, [-0.5, -0.1]),
        ({"mode": "truncate", "cap": 1e12}, [0.0, 0.0]),
    ],
)
def test_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    assert coefficients([0.5, 0.1], [0.3, 0.3], **options) == pytest.approx(expected, abs=1e-15)


def test_the_rest_by_hand() -> None:
    # q has .4 outside the head and p .2: s = 2. α = clamp(1, 0, 1.5 · 2) = 1; with a floor clamp(1, 1.2, 3) = 1.2.
    p, q = [0.5, 0.3], [0.3, 0.3]
    assert coefficients(p, q, mode="none") == pytest.approx([0.3 - 2 * 0.5, 0.3 - 2 * 0.3], abs=1e-15)
    assert coefficients(p, q, mode="truncate") == pytest.approx([0.45 - 0.5, 0.3 - 0.3], abs=1e-15)
    assert coefficients(p, q, mode="truncate", floor=FLOOR) == pytest.approx([0.45 - 0.6, 0.3 - 0.36], abs=1e-15)
    # Its weight 1/2 is below the floor of .6, so nothing is taken for the rest.
    assert coefficients(p, q, mode="mask", floor=FLOOR) == pytest.approx([0.0, 0.3], abs=1e-15)


VOCABULARY = 7
MODES: list[dict[str, Any]] = [
    {"mode": "none", "cap": CAP},
    {"mode": "truncate", "cap": CAP},
    {"mode": "truncate", "cap": 1.1},
    {"mode": "mask", "cap": CAP, "floor": FLOOR},
]


def expected_gradient(
    logits: Tensor, sampler: Tensor, advantage: Tensor, k: int | None, options: dict[str, Any]
) -> Tensor:
    """The exact gradient by the logits of −A w log p (+ A · C of the `k` likeliest), over all tokens that `sampler` may
    draw."""
    logits = logits.clone().requires_grad_()
    logp, logq = torch.log_softmax(logits, -1), torch.log_softmax(sampler, -1)
    given = logp.detach()[:, None], logq[:, None], torch.ones(VOCABULARY, 1)
    weights, _ = importance_weights(*given, **options)
    losses = -advantage * weights[:, 0].detach() * logp
    if k is not None:
        top = logq.topk(k).indices
        losses = losses + advantage * score_centering(logp[top][None], logq[top][None], **options)
    (logq.exp() * losses).sum().backward()
    assert logits.grad is not None
    return logits.grad


def policies(tail: float | None = None) -> tuple[Tensor, Tensor]:
    """Logits of a policy and of its sampler; the four least likely tokens of the sampler differ by the same `tail`."""
    random = torch.Generator().manual_seed(5)
    policy = torch.randn(VOCABULARY, generator=random, dtype=torch.float64)
    sampler = policy + torch.randn(VOCABULARY, generator=random, dtype=torch.float64)
    if tail is not None:
        policy[3:] -= 5
        sampler[:3] = policy[:3] + torch.tensor([0.5, -0.8, 0.2], dtype=torch.float64)
        sampler[3:] = policy[3:] + tail
    return policy, sampler


@pytest.mark.parametrize("options", MODES, ids=lambda o: "-".join(map(str, o.values())))
def test_equal_advantages_move_nothing(options: dict[str, Any]) -> None:
    """With A = 1 for all tokens the drift is exactly 0 where the head is the vocabulary, and where q is s p outside."""
    ones = torch.ones(VOCABULARY, dtype=torch.float64)
    for k, given in ((VOCABULARY, policies()), (3, policies(tail=0.3)), (3, policies(tail=-0.7))):
        drift = expected_gradient(*given, ones, None, options)
        centred = expected_gradient(*given, ones, k, options)
        assert drift.abs().max() > 1e-3
        torch.testing.assert_close(centred, torch.zeros_like(centred), rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", MODES, ids=lambda o: "-".join(map(str, o.values())))
def test_an_advantages_shift_does_not_matter(options: dict[str, Any]) -> None:
    """The expected gradient depends on advantages up to a constant, as with a sampler that is the policy."""
    rewards, given = torch.arange(VOCABULARY, dtype=torch.float64), policies()
    shifts = [rewards, rewards - 3, rewards + 10]
    centred = [expected_gradient(*given, advantage, VOCABULARY, options) for advantage in shifts]
    plain = [expected_gradient(*given, advantage, None, options) for advantage in shifts]
    # A · C has the mean advantage under q for each token's own, so the shift alone drops out.
    for other in centred[1:]:
        torch.testing.assert_close(other, centred[0], rtol=0, atol=1e-11)
    assert (plain[1] - plain[0]).abs().max() > 1e-2


def test_exact_weights_and_equal_samplers_need_nothing() -> None:
    policy, sampler = policies()
    ones = torch.ones(VOCABULARY, dtype=torch.float64)
    found = [expected_gradient(policy, sampler, ones, None, {"mode": "truncate", "cap": 1e12})]
    found += [expected_gradient(policy, policy, ones, k, options) for options in MODES for k in (None, 3, VOCABULARY)]
    for gradient in found:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_gradcheck_with_the_coefficients_held() -> None:
    """C's gradient is that of Σ c log p with constant c, through a softmax, for several tokens at a time."""
    random = torch.Generator().manual_seed(6)
    logits = torch.randn(4, 9, generator=random, dtype=torch.float64, requires_grad=True)
    top = torch.log_softmax(torch.randn(4, 9, generator=random, dtype=torch.float64), -1).topk(3)
    for options in MODES:
        held = torch.func.grad(lambda x, o=options: score_centering(x, top.values, **o).sum())(
            torch.log_softmax(logits.detach(), -1).gather(1, top.indices)
        )

        def centering(z: Tensor, c: Tensor = held) -> Tensor:
            return (c * torch.log_softmax(z, -1).gather(1, top.indices)).sum(-1)

        assert torch.autograd.gradcheck(centering, (logits,))
        ours = score_centering(torch.log_softmax(logits, -1).gather(1, top.indices), top.values, **options)
        torch.testing.assert_close(
            torch.autograd.grad(ours.sum(), logits)[0], torch.autograd.grad(centering(logits).sum(), logits)[0]
        )


def test_tokens_that_are_not_there_count_nothing() -> None:
    """What fills up a small kept set has no probability, and a head that is all there is leaves no rest."""
    p, q = [0.6, 0.4], [0.5, 0.5]
    for options in ({"mode": "none"}, {"mode": "truncate"}, {"mode": "mask", "floor": FLOOR}):
        given = [torch.tensor([x], dtype=torch.float64).log() for x in (p, q)]
        padded = [torch.nn.functional.pad(x, (0, 2), value=-1e30) for x in given]
        one, other = (score_centering(*x, **{"cap": CAP} | options) for x in (given, padded))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.isfinite().all()
