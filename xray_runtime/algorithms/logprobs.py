"""Log-probabilities and entropies of tokens in one pass over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _LogprobsAndEntropy(torch.autograd.Function):
    # Exactly one [N, V] tensor is kept for backward: the log-softmax. Autograd's own log_softmax + gather + entropy
    # would keep it, the probabilities and their product.

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits, dim=-1)
        entropy = -(logp.exp() * logp).sum(-1)
        ctx.save_for_backward(logp, targets, entropy)
        return logp.gather(-1, targets[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logp, targets, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        p = logp.exp()
        # ∂ logp_y / ∂ z = onehot(y) − p;  ∂ H / ∂ z = −p · (log p + H)
        grad = p * (-grad_logprobs[:, None])
        grad.scatter_add_(-1, targets[:, None], grad_logprobs[:, None].to(grad.dtype))
        if grad_entropy.any():
            grad -= grad_entropy[:, None] * p * (logp + entropy[:, None])
        return grad, None


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, in nats.

    Args:
        logits: [N, V], any float dtype; the arithmetic is float32 at least.
        targets: [N] int64.
        temperature: logits are divided by it first.

    Returns:
        (logprobs [N], entropy [N]), both differentiable.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs, entropy = _LogprobsAndEntropy.apply(logits, targets)
    return logprobs, entropy
