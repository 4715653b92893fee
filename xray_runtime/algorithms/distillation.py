"""Distillation: what a teacher's log-probabilities say about a student's.

π is the student, T the teacher, both at one temperature over one vocabulary. Shapes: N tokens, k candidates for each
token (the teacher's likeliest, or all), H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from xray_runtime.algorithms.advantages import masked_mean
from xray_runtime.algorithms.kl import clamp_log_ratio
from xray_runtime.algorithms.logprobs import MAX_LOGITS, MAX_LOGITS_ON_GPU


def teacher_advantages(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """−(log π − log T) of each sampled token less the mean over all that count, 0 at masked ones; any shape.

    With y ~ π, E[(log π(y) − log T(y)) ∇ log π(y)] = ∇ KL(π ‖ T) at each position, so a policy gradient on these
    advantages descends the reverse KL (Agarwal et al. 2024, Lu 2025). Deviation: they subtract no baseline. The mean
    leaves the expectation, and without it a sharp teacher's first steps push nearly all sampled tokens down
    (`benchmarks.distillation`). Where the two are equal every advantage is exactly 0, and so is the gradient.
    """
    surplus = -clamp_log_ratio(logprobs - teacher_logprobs)
    return (surplus - masked_mean(surplus, mask)) * mask


def generalized_jsd(logprobs: Tensor, teacher_logprobs: Tensor, beta: float, *, whole: bool) -> Tensor:
    """β KL(T ‖ M) + (1 − β) KL(π ‖ M), M = β T + (1 − β) π, in nats [N] (GKD, Agarwal et al. 2024).

    At β = 0, and at 1, where this is 0, it is what it approaches relative to β and to 1 − β: the forward KL(T ‖ π), and
    the reverse KL(π ‖ T). Each term is p ln(p/m) − p + m ≥ 0, whose sum is the KL, and which is exactly 0 with an exact
    gradient where both sides are equal.

    Args:
        logprobs: of the candidates by the student [N, k], with gradients.
        teacher_logprobs: by the teacher.
        whole: whether the candidates are the whole vocabulary. Else all other tokens count as one event, which makes
            the divergence smaller, never larger (data processing inequality).
    """
    if not whole:
        logprobs = torch.cat([logprobs, _rest(logprobs)], -1)
        teacher_logprobs = torch.cat([teacher_logprobs, _rest(teacher_logprobs)], -1)
    if beta == 0.0:
        return _kl(teacher_logprobs, logprobs)
    if beta == 1.0:
        return _kl(logprobs, teacher_logprobs)
    apart = teacher_logprobs - logprobs
    # log M from the likelier side: nothing overflows, and M is that side exactly where both are equal.
    mixture = torch.where(
        apart <= 0,
        logprobs + torch.log1p(beta * torch.expm1(apart.clamp(max=0))),
        teacher_logprobs + torch.log1p((1 - beta) * torch.expm1((-apart).clamp(max=0))),
    )
    return beta * _kl(teacher_logprobs, mixture) + (1 - beta) * _kl(logprobs, mixture)


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    return (logp.exp() * (logp - logq) - logp.exp() + logq.exp()).sum(-1)


def _rest(logprobs: Tensor) -> Tensor:
    """Log-probability [N, 1] of all tokens that are not among the candidates."""
    # Rounding may leave nothing to them, or less.
    return (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=1e-7).log()


@torch.no_grad()
def likeliest(
    output_layer: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    count: int,
    *,
    num_tokens: int,
    vocab_size: int,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of each target [N], ids of the `count` likeliest tokens [N, k] int32, their log-probabilities),
    logits being made for a chunk of `max_logits` at a time, as in `logprobs.chunked_logprobs_and_entropy`.

    Args:
        output_layer: states [n, H] → logits [n, V].
        count: k, at most `num_tokens`.
        num_tokens: only the first of the vocabulary are candidates: those that the student has too.
    """
    max_logits = max_logits or (MAX_LOGITS_ON_GPU if hidden.is_cuda else MAX_LOGITS)
    parts = []
    num_chunks = max(math.ceil(len(hidden) / max(max_logits // vocab_size, 1)), 1)
    for states, ids in zip(hidden.tensor_split(num_chunks), targets.tensor_split(num_chunks), strict=True):
        logits = output_layer(states)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        logp = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)
        most = logp[:, :num_tokens].topk(count, -1)
        parts.append((logp.gather(-1, ids[:, None]).squeeze(-1), most.indices.int(), most.values))
    own, chosen, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return own, chosen, values
