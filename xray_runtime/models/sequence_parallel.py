"""Sequence parallelism (DeepSpeed Ulysses, Jacobs et al. 2023): ranks share the tokens of a row of packed sequences.

Each of P ranks computes the layers for M / P neighbouring tokens of the row. For attention the ranks exchange tokens
for heads, so that each sees all tokens of a / P heads, and back. Whatever follows the layers is computed where its
token is, and what is one number a token then goes to all ranks: they compute the same loss, and what each has of the
gradient is its tokens' share, to be summed over the ranks as over data-parallel ones.

Shapes: N tokens of all sequences, of which M are in the row; m = ⌈M / P⌉ a rank, the last ones padded; a heads, k
key-value heads, d head size, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding, pad
from torch.utils._pytree import tree_map

T = TypeVar("T")


class _SequenceExchange(torch.autograd.Function):
    # Part i of a rank's tensor becomes part r of rank i's, if r is its own number: this is its own transpose.

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0].contiguous(), ctx.group), None


class _Sum(torch.autograd.Function):
    # All ranks compute the same of the sum, so each has the whole gradient of its own part already.

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    """From [P, ...], a part for each rank, a part of each rank [P, ...]."""
    received: Tensor = _SequenceExchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share each row; this is number `rank` of `size`."""

    group: Any
    """Their process group."""
    rank: int
    size: int

    def share(self, row: Tensor) -> Tensor:
        """This rank's tokens [m, ...] of a row [M, ...]; what pads it is 0."""
        count = math.ceil(len(row) / self.size)
        first = self.rank * count
        own = row[first : first + count]
        return pad(own, (0, 0) * (own.dim() - 1) + (0, count - len(own)))

    def by_heads(self, tokens: Tensor, num_tokens: int, num_heads: int) -> Tensor:
        """All M tokens of this rank's heads [1, a / P, M, d], of all heads of its tokens [1, k, m, d].

        Args:
            num_heads: a. Where the ranks do not divide fewer key-value heads, these are repeated until they do; then
                each is still on the ranks with the queries that see it.
        """
        kv_heads = tokens.shape[1]
        again = self.size // math.gcd(kv_heads, self.size)
        assert num_heads % (kv_heads * again) == 0
        heads = tokens[0].repeat_interleave(again, 0) if again > 1 else tokens[0]
        received = _exchanged(heads.unflatten(0, (self.size, -1)).contiguous(), self.group)
        return received.transpose(0, 1).flatten(1, 2)[None, :, :num_tokens]

    def by_tokens(self, heads: Tensor) -> Tensor:
        """All heads of this rank's tokens [1, m, a, d], of all tokens of its heads [1, M, a / P, d]."""
        count = math.ceil(heads.shape[1] / self.size)
        padded = pad(heads[0], (0, 0, 0, 0, 0, count * self.size - heads.shape[1]))
        received = _exchanged(padded.unflatten(0, (self.size, count)).contiguous(), self.group)
        return received.transpose(0, 1).flatten(1, 2)[None]

    def summed(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, of which all ranks then compute the same."""
        total: Tensor = _Sum.apply(part, self.group)  # type: ignore[no-untyped-call]
        return total

    def whole(self, own: Tensor, num_tokens: int) -> Tensor:
        """The row [M, ...] of every rank's tokens [m, ...]."""
        before = self.rank * len(own)
        after = (self.size - self.rank - 1) * len(own)
        return self.summed(pad(own, (0, 0) * (own.dim() - 1) + (before, after)))[:num_tokens]


@dataclass(frozen=True)
class SharedStates:
    """Hidden states of N tokens, of which this rank has some. As a tensor of them [N, H] it takes an index."""

    own: Tensor
    """[n, H]."""
    source: Tensor
    """Index in `own` of each of the N tokens [N]; of other ranks' tokens −1."""
    ranks: SequenceRanks

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Tensor) -> SharedStates:
        return SharedStates(self.own, self.source[index], self.ranks)


States = Tensor | SharedStates
"""Hidden states [N, H]."""


def shared_states(own: Tensor, places: Tensor, ranks: SequenceRanks) -> SharedStates:
    """States of tokens at these `places` [N] of a row, of which this rank has `own` [m, H]."""
    index = places - ranks.rank * len(own)
    return SharedStates(own, torch.where((index >= 0) & (index < len(own)), index, -1), ranks)


def each_where_it_is(compute: Callable[..., T], states: States, *aligned: Tensor) -> T:
    """`compute(states, *aligned)`, tensors [N, …] with an entry a state, each computed by a rank that has it. `aligned`
    have one entry a state."""
    if isinstance(states, Tensor):
        return compute(states, *aligned)
    mine = (states.source >= 0).nonzero().squeeze(-1)

    def whole(numbers: Tensor) -> Tensor:
        zeros = numbers.new_zeros(len(states), *numbers.shape[1:])
        return states.ranks.summed(zeros.index_add(0, mine, numbers))

    made: T = tree_map(whole, compute(embedding(states.source[mine], states.own), *(each[mine] for each in aligned)))
    return made
