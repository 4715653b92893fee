"""Checks for an algorithm of your own: properties that every advantage estimator and every policy loss must have.

    xray.check_advantages(mine)      in a test, on random rollouts in float64
    xray.check_loss(mine)

A stage that is given such a function runs the same checks before it computes anything, but for the gradient's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xray_runtime.algorithms.estimators import AdvantageEstimator, AdvantageInputs, estimate
from xray_runtime.algorithms.losses import PolicyLoss, PolicyLossInputs, token_loss
from xray_runtime.kernel.errors import first_line

LENGTHS = (4, 1, 3, 4, 2, 3, 3, 4)
"""Response tokens of the eight replies that are tried: two to each of four prompts."""
TOLERANCE = 1e-9
"""Between two ways to compute one number in float64."""


def check_advantages(estimator: AdvantageEstimator, name: str = "it") -> None:
    """Try an estimator, `name` in errors, on random rollouts.

    Raises:
        ValueError: what it returns has a wrong shape or is not finite; or depends on padding, or on the order of the
            replies.
    """
    rollout = _rollout()
    plain, _ = estimate(estimator, rollout, name)
    pad: dict[str, Any] = {
        field: torch.nn.functional.pad(getattr(rollout, field), (0, 2)) for field in ("rewards", "mask", "values")
    }
    padded, _ = estimate(estimator, replace(rollout, **pad), name)
    if not _equal(padded[:, : plain.shape[1]], plain):
        raise ValueError(f"advantages: {name} depends on padding: count tokens where `mask` is True alone")
    order = torch.tensor([3, 0, 6, 1, 7, 5, 2, 4])
    columns = ("scores", "rewards", "mask", "groups", "values", "bootstrap_values")
    moved, _ = estimate(estimator, replace(rollout, **{c: getattr(rollout, c)[order] for c in columns}), name)
    if not _equal(moved, plain[order]):
        raise ValueError(f"advantages: {name} depends on the order of the replies: `groups` says which belong together")


def check_loss(loss: PolicyLoss, name: str = "it", *, gradient: bool = True) -> None:
    """Try a policy loss, `name` in errors, on random tokens.

    Args:
        gradient: also hold its gradient against finite differences. False where it stops gradients on purpose, as CISPO
            does.

    Raises:
        ValueError: what it returns has a wrong shape or is not finite; couples tokens of two replies, so that the split
            into micro-batches would matter; depends on tokens that the policy did not choose; or its gradient is wrong.
    """
    tokens = _tokens()
    plain = _loss_of(loss, tokens, name)
    assert tokens.replies is not None
    for reply in range(len(LENGTHS)):
        mine = tokens.replies == reply
        alone = _loss_of(loss, _select(tokens, mine), name)
        if not _equal(alone * tokens.mask[mine], (plain * tokens.mask)[mine]):
            raise ValueError(f"loss: {name} couples tokens of two replies: the split into micro-batches would matter")
    other = torch.where(tokens.mask.bool(), tokens.logprobs, tokens.logprobs - 0.5)
    if not _equal(_loss_of(loss, replace(tokens, logprobs=other), name) * tokens.mask, plain * tokens.mask):
        raise ValueError(f"loss: {name} depends on tokens that the policy did not choose: leave out those with mask 0")
    if gradient:
        _check_gradient(lambda logprobs: _loss_of(loss, replace(tokens, logprobs=logprobs), name) * tokens.mask, name)


def _check_gradient(function: Callable[[Tensor], Tensor], name: str) -> None:
    logprobs = _tokens().logprobs.clone().requires_grad_()
    try:
        torch.autograd.gradcheck(lambda x: function(x).sum(), (logprobs,), eps=1e-6, atol=1e-6, rtol=1e-4)
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(f"loss: the gradient of {name} is not that of finite differences ({reason})") from None


def _equal(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE)


def _loss_of(loss: PolicyLoss, tokens: PolicyLossInputs, name: str) -> Tensor:
    found = token_loss(loss, tokens, name).loss
    if not found.isfinite().all():
        raise ValueError(f"loss: {name} returned {int((~found.isfinite()).sum())} numbers that are not finite")
    return found


def _select(tokens: PolicyLossInputs, mine: Tensor) -> PolicyLossInputs:
    columns = ("logprobs", "old_logprobs", "advantages", "mask")
    taken: dict[str, Any] = {column: getattr(tokens, column)[mine] for column in columns}
    return replace(tokens, **taken, replies=torch.zeros(int(mine.sum()), dtype=torch.int64))


def _mask() -> Tensor:
    """[B, T], with a hole in the first reply: those tokens came from an environment, not from the policy."""
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask[0, 1] = False
    return mask


def _rollout() -> AdvantageInputs:
    random, mask = torch.Generator().manual_seed(0), _mask()
    batch = len(LENGTHS)
    rewards = torch.randn(mask.shape, generator=random, dtype=torch.float64) * mask
    values = torch.randn(mask.shape, generator=random, dtype=torch.float64) * mask
    groups, nothing = torch.arange(batch) // 2, torch.zeros(batch, dtype=torch.float64)
    return AdvantageInputs(rewards.sum(-1), rewards, mask, groups, values, nothing, gamma=0.9, gae_lambda=0.8)


def _tokens() -> PolicyLossInputs:
    random = torch.Generator().manual_seed(1)
    replies = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))

    def normal() -> Tensor:
        return torch.randn(len(replies), generator=random, dtype=torch.float64)

    mask = _mask()[torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]].double()
    old = -normal().abs() - 0.5
    return PolicyLossInputs(old + 0.3 * normal(), old, normal(), mask, replies, 0.2, 0.25, 3.0)
