"""Expert parallelism: neighbouring ranks hold different experts of each layer, and tokens travel to theirs.

Rank r of R · D ranks holds the experts of its place r mod D among `degree` D peers; the R ranks with the same place
shard these among them as FSDP2 does, and all else is sharded over all ranks. Peers have rows of their own, so each
sends every chosen expert its tokens, gets those of the others, and sends the results back (GShard, Lepikhin et al.
2021). No token is dropped.

Shapes: N tokens of this rank with K experts each, M tokens that arrive, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from xray_runtime.kernel.store.shards import Piece
from xray_runtime.models.experts import expert_modules, keep_own, of_pairs, summed
from xray_runtime.models.heads import HeadedLM


class ExpertParallel:
    """The experts of `module`, of which this rank keeps its own.

    Attributes:
        mesh: the ranks that hold the same experts.
        modules: those that hold experts, to be sharded over `mesh`.
        names: of their parameters.

    Raises:
        ValueError: the model has no experts, or not a multiple of `degree`.
    """

    def __init__(self, module: HeadedLM, degree: int, device: torch.device) -> None:
        found = dict(expert_modules(module))
        refused = f"engine.expert_parallel: {degree} is not allowed"
        if not found:
            raise ValueError(f"{refused}: a {type(module.lm).__name__} has no experts that can be shared")
        if wrong := next((e.num_experts for e in found.values() if e.num_experts % degree), None):
            raise ValueError(f"{refused}: it must divide the model's {wrong} experts")
        self._degree, self._place = degree, dist.get_rank() % degree
        both = init_device_mesh(
            device.type, (dist.get_world_size() // degree, degree), mesh_dim_names=("same", "peers")
        )
        self.mesh, self._peers = both["same"], both.get_group("peers")
        self.modules = [*found.values()]
        self.names = {f"{name}.{key}" for name, experts in found.items() for key, _ in experts.named_parameters()}
        for experts in self.modules:
            own = keep_own(experts, self._place, degree)
            experts.forward = _Dispatch(experts, experts.forward, own, self._peers)

    def piece(self, shape: tuple[int, ...], low: int, high: int) -> Piece:
        """Rows `low` to `high` of this rank's experts, a tensor of `shape`, as a part of all."""
        first = shape[0] * self._place
        return Piece.of((shape[0] * self._degree, *shape[1:]), 0, (first + low, first + high))

    def joined(self, own: Tensor) -> Tensor:
        """The experts of all peers [E, …]."""
        parts = [torch.empty_like(own) for _ in range(self._degree)]
        dist.all_gather(parts, own.contiguous(), group=self._peers)
        return torch.cat(parts)


class _Dispatch:
    """The forward pass of a module of experts over the tokens of all peers."""

    def __init__(self, experts: Any, compute: Any, own: int, peers: dist.ProcessGroup) -> None:
        self._experts, self._compute, self._own, self._peers = experts, compute, own, peers

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum [N, H] of the results of K experts, for tokens [N, H], their experts [N, K] and weights."""
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        token = order // top_k_index.shape[1]
        sent = torch.bincount(chosen // self._own, minlength=self._peers.size())
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self._peers)
        splits = sent.tolist(), got.tolist()
        expert = chosen.new_empty(sum(splits[1]))
        dist.all_to_all_single(expert, (chosen % self._own)[order], splits[1], splits[0], group=self._peers)
        arrived = _ExpertExchange.apply(hidden_states[token], *splits, self._peers)  # type: ignore[no-untyped-call]
        made = of_pairs(self._experts, self._compute, arrived, expert)
        back = _ExpertExchange.apply(made, *splits[::-1], self._peers)  # type: ignore[no-untyped-call]
        return summed(back, top_k_weights.flatten()[order], token, hidden_states)


class _ExpertExchange(torch.autograd.Function):
    """Rows [N, H] for all peers → those of all peers [M, H]; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], peers: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.peers = (sent, got), peers
        arrived = rows.new_empty(sum(got), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), got, sent, group=peers)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (sent, got) = gradients, ctx.splits
        rows = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(rows, gradient.contiguous(), sent, got, group=ctx.peers)
        return rows, None, None, None
