"""Log-probabilities and entropies of tokens in one pass over the vocabulary, with logits of few tokens at a time.

Shapes: N tokens, H hidden, V vocabulary, k candidates for each token, m tokens of a kept set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MAX_LOGITS, MAX_LOGITS_ON_GPU = 2**24, 2**28
"""Most logits that exist at a time: 64 MiB and 1 GiB in float32, and up to two tensors like them. A chunk moves the
output layer's weight through a GPU's memory seven times; with 110 tokens, that took longer than their products."""
SCORED_TOKENS = 512
"""Most tokens of a chunk on a CPU where no gradient is wanted, so that more chunks compute nothing again."""
NO_LOGPROB = -1e30
"""Stands for the log-probability of a token that cannot be: e to this is 0, and 0 times it is no NaN."""


class _LogprobsAndEntropy(torch.autograd.Function):
    # Exactly one [N, V] tensor is kept for backward: the log-softmax. Autograd's own log_softmax + gather + entropy
    # would keep it, the probabilities and their product.

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # Unused outputs have no gradient, instead of zeros: to find zeros, the host would wait for the GPU.
        ctx.set_materialize_grads(False)
        logp = torch.log_softmax(logits, dim=-1)
        entropy = -logp.exp().mul_(logp).sum(-1)
        ctx.save_for_backward(logp, targets, entropy)
        return logp.gather(-1, _columns(targets)).view_as(targets), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        logp, targets, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        p = logp.exp()
        # ∂ logp_y / ∂ z = onehot(y) − p;  ∂ H / ∂ z = −p · (log p + H)
        grad = None
        if grad_entropy is not None:
            grad = (logp + entropy[:, None]).mul_(p).mul_(-grad_entropy[:, None])
        if grad_logprobs is None:
            return grad, None
        of_each = _columns(grad_logprobs)
        p.mul_(-of_each.sum(-1, keepdim=True))
        p.scatter_add_(-1, _columns(targets), of_each.to(p.dtype))
        return p if grad is None else grad.add_(p), None


def _columns(of_tokens: Tensor) -> Tensor:
    """[N, k] of [N, k] or [N]."""
    return of_tokens if of_tokens.dim() == 2 else of_tokens[:, None]


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, in nats.

    Args:
        logits: [N, V], any float dtype; the arithmetic is float32 at least.
        targets: [N] int64, or [N, k] of several candidates for each token.
        temperature: logits are divided by it first.

    Returns:
        (logprobs of the targets' shape, entropy [N]), both differentiable.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs, entropy = _LogprobsAndEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def chunked_logprobs_and_entropy(
    output_layer: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    vocab_size: int,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`logprobs_and_entropy(output_layer(hidden), targets, temperature)`, logits being made for a chunk at a time.

    The backward pass computes a chunk's logits again instead of keeping them. Chunks depend on shapes, and on whether
    there will be a backward pass; where all logits are no more than `max_logits` there is one, which is kept.

    Args:
        output_layer: states [n, H] → logits [n, V].
        hidden: [N, H].
        targets: [N] or [N, k] int64.
        vocab_size: V.
        max_logits: None: `MAX_LOGITS`, but no more than those of `SCORED_TOKENS` without a backward pass; on a GPU
            `MAX_LOGITS_ON_GPU`.

    Returns:
        (logprobs of the targets' shape, entropy [N]).
    """
    scores = not torch.is_grad_enabled()
    if max_logits is None:
        max_logits = MAX_LOGITS_ON_GPU if hidden.is_cuda else MAX_LOGITS
        if scores and not hidden.is_cuda:
            max_logits = min(max_logits, SCORED_TOKENS * vocab_size)

    def chunk(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(output_layer(states), ids, temperature)

    num_chunks = math.ceil(len(hidden) / max(max_logits // vocab_size, 1))
    if num_chunks <= 1:
        return chunk(hidden, targets)
    parts = [
        chunk(states, ids) if scores else checkpoint(chunk, states, ids, use_reentrant=False, preserve_rng_state=False)
        for states, ids in zip(hidden.tensor_split(num_chunks), targets.tensor_split(num_chunks), strict=True)
    ]
    logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropy


def within_kept(logprobs: Tensor, of_kept: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From log-probabilities in the whole vocabulary to those in a kept set, from which top-p, top-k or min-p sampled.

    Args:
        logprobs: of candidates [N, k] in the set.
        of_kept: of all tokens of each set [N, m], with others where `there` [N, m] is False.

    Returns:
        (logprobs [N, k] of the candidates within the set, entropy [N] of the distribution on it, log of its mass [N]),
        all differentiable.
    """
    of_kept = of_kept.masked_fill(~there, NO_LOGPROB)
    log_mass = of_kept.logsumexp(-1)
    within = of_kept - log_mass[:, None]
    return logprobs - log_mass[:, None], -(within.exp() * within).sum(-1), log_mass
