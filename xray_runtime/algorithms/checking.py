"""Checks for an algorithm of your own: properties that every advantage estimator and every policy loss must have.

    xray.check_advantages(mine)      in a test, on random rollouts in float64
    xray.check_loss(mine)

A stage that is given such a function runs the same checks before it computes anything, but for the gradient's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xray_runtime.algorithms.estimators import AdvantageEstimator, AdvantageInputs, estimate
from xray_runtime.algorithms.losses import PolicyLoss, PolicyLossInputs, token_loss
from xray_runtime.algorithms.streams import TOPK, Probe
from xray_runtime.kernel.errors import first_line

LENGTHS = (4, 1, 3, 4, 2, 3, 3, 4)
"""Response tokens of the eight replies that are tried: two to each of four prompts."""
NUM_TOP = 3
"""The sampler's likeliest tokens in the place of each."""
TOLERANCE = 1e-9
"""Between two ways to compute one number in float64."""
BY_TOKEN = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "turns", "versions", "teacher_logprobs")
"""Streams of single tokens; all others are of whole replies."""


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
    wider = dict.fromkeys(BY_TOKEN, (0, 2)) | dict.fromkeys(TOPK, (0, 0, 0, 2))
    pad["streams"] = _probe(rollout).map(lambda s, x: torch.nn.functional.pad(x, wider.get(s, (0, 0))))
    padded, _ = estimate(estimator, replace(rollout, **pad), name)
    if not _equal(padded[:, : plain.shape[1]], plain):
        raise ValueError(f"advantages: {name} depends on padding: count tokens where `mask` is True alone")
    order = torch.tensor([3, 0, 6, 1, 7, 5, 2, 4])
    columns = ("scores", "rewards", "mask", "groups", "values", "bootstrap_values")
    taken: dict[str, Any] = {column: getattr(rollout, column)[order] for column in columns}
    taken["streams"] = _probe(rollout).map(lambda stream, x: x if stream == "source_weights" else x[order])
    moved, _ = estimate(estimator, replace(rollout, **taken), name)
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
    chosen = tokens.mask.bool()

    def other_unless_chosen(_: str, x: Tensor) -> Tensor:
        return torch.where(chosen.view(-1, *[1] * (x.dim() - 1)), x, x - 0.5) if x.is_floating_point() else x

    others = _probe(tokens).map(other_unless_chosen)
    other = replace(tokens, logprobs=torch.where(chosen, tokens.logprobs, tokens.logprobs - 0.5), streams=others)
    if not _equal(_loss_of(loss, other, name) * tokens.mask, plain * tokens.mask):
        raise ValueError(f"loss: {name} depends on tokens that the policy did not choose: leave out those with mask 0")
    if gradient:
        _check_gradient(lambda logprobs: _loss_of(loss, replace(tokens, logprobs=logprobs), name) * tokens.mask, name)


def loss_reads(loss: PolicyLoss, name: str = "it") -> frozenset[str]:
    """The streams that a policy loss reads. Raises ValueError: one of them is not there."""
    tokens = _tokens()
    token_loss(loss, tokens, name)
    return frozenset(_probe(tokens).noted)


def advantage_reads(estimator: AdvantageEstimator, name: str = "it") -> frozenset[str]:
    """The streams that an estimator reads. Raises ValueError: one of them is not there."""
    rollout = _rollout()
    estimate(estimator, rollout, name)
    return frozenset(_probe(rollout).noted)


def _probe(inputs: AdvantageInputs | PolicyLossInputs) -> Probe:
    assert isinstance(inputs.streams, Probe)
    return inputs.streams


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
    columns = ("logprobs", "advantages", "mask")
    taken: dict[str, Any] = {column: getattr(tokens, column)[mine] for column in columns}
    taken["streams"] = _probe(tokens).map(lambda _, values: values[mine])
    return replace(tokens, **taken, replies=torch.zeros(int(mine.sum()), dtype=torch.int64))


def _mask() -> Tensor:
    """[B, T], with a hole in the first reply: those tokens came from an environment, not from the policy."""
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask[0, 1] = False
    return mask


def _column(name: str, count: int) -> Tensor:
    """Random numbers in the dataset's column `name`, one a reply."""
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(count, generator=random, dtype=torch.float64)


def _rollout() -> AdvantageInputs:
    random, mask = torch.Generator().manual_seed(0), _mask()
    batch = len(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    rewards, values = normal(*mask.shape) * mask, normal(*mask.shape) * mask
    groups, nothing = torch.arange(batch) // 2, torch.zeros(batch, dtype=torch.float64)
    streams = {name: (-normal(*mask.shape).abs() - 0.5) * mask for name in BY_TOKEN}
    streams["turns"] = (mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]).long().cumsum(-1).sub(1).clamp(min=0)
    streams["versions"] = torch.arange(mask.numel()).reshape(mask.shape) % 3
    streams |= {"sources": normal(batch, 2), "source_weights": normal(2).abs()}
    streams["seat_means"] = normal(batch)
    streams["topk_ids"] = torch.arange(NUM_TOP).expand(*mask.shape, NUM_TOP)
    streams["topk_logprobs"] = (-normal(*mask.shape, NUM_TOP).abs() - 1.5).log_softmax(-1) - 0.1
    probe = Probe(streams, lambda name: _column(name, batch), set())
    return AdvantageInputs(rewards.sum(-1), rewards, mask, groups, values, nothing, 0.9, 0.8, probe)


def _tokens() -> PolicyLossInputs:
    random = torch.Generator().manual_seed(1)
    replies = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))

    def normal() -> Tensor:
        return torch.randn(len(replies), generator=random, dtype=torch.float64)

    chosen = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask = _mask()[chosen].double()
    old = -normal().abs() - 0.5
    logprobs, advantages = old + 0.3 * normal(), normal()
    streams = {"old_logprobs": old, "rollout_logprobs": old + 0.1 * normal(), "ref_logprobs": old + 0.3 * normal()}
    streams |= {"teacher_logprobs": old + 0.3 * normal()}
    rollout = _rollout()
    streams |= {"turns": rollout.turns[chosen], "versions": rollout.versions[chosen], "groups": replies // 2}
    likely = (-torch.rand(2, len(replies), NUM_TOP, generator=random, dtype=torch.float64) - 1.5).log_softmax(-1) - 0.1
    ids = torch.arange(NUM_TOP).repeat(len(replies), 1)
    streams |= dict(zip(TOPK, (ids, *likely), strict=True))
    streams["chosen"] = normal() > 0.5
    probe = Probe(streams, lambda name: _column(name, len(LENGTHS))[replies], set())
    return PolicyLossInputs(logprobs, advantages, mask, replies, 0.2, 0.25, 3.0, probe)
