"""The modules that hold the experts of a mixture's layers, of which a rank may keep its own.

Shapes: N tokens with K experts each, M chosen (token, expert) pairs, H hidden, E experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
"""Arguments of the forward pass of transformers' modules of experts, whose parameters all are [E, …]."""


def expert_modules(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of those whose experts can be shared."""
    for name, each in module.named_modules():
        number = getattr(each, "num_experts", None)
        own = [*each.parameters(recurse=False)]
        if not number or not own or any(p.dim() < 2 or p.shape[0] != number for p in own):
            continue
        if tuple(inspect.signature(type(each).forward).parameters)[1:] == ARGUMENTS:
            yield name, each


def keep_own(experts: Any, place: int, degree: int) -> int:
    """Keep the experts of `place` among `degree` peers; returns their number."""
    own: int = experts.num_experts // degree
    for key, old in list(experts.named_parameters()):
        rows = old.detach()[place * own : (place + 1) * own].clone()
        setattr(experts, key, nn.Parameter(rows, requires_grad=old.requires_grad))
    experts.num_experts = own
    return own


def of_pairs(experts: nn.Module, compute: Callable[..., Tensor], states: Tensor, chosen: Tensor) -> Tensor:
    """Results [M, H] of one expert [M] each for `states` [M, H]; without any pair the parameters still get gradients,
    of zeros, since peers wait for them."""
    if len(states):
        return compute(states, chosen[:, None], states.new_ones(len(states), 1))
    return states + sum(0.0 * parameter.flatten()[0] for parameter in experts.parameters())


def summed(results: Tensor, weights: Tensor, token: Tensor, like: Tensor) -> Tensor:
    """The sums [N, H] of weighted results [M, H] of each token."""
    weighted = results * weights[:, None].to(results.dtype)
    return like.new_zeros(like.shape).index_add(0, token, weighted)
