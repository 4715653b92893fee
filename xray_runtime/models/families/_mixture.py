"""Routers of mixtures of experts: the loss by which they shall use all experts alike (Fedus et al. 2021, eq. 4 to 6),
how they do, and which experts they choose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from xray_runtime.models.family import Auxiliary, HFConfig, Routing

if TYPE_CHECKING:
    from torch import Tensor


def load_balancing(router_logits: tuple[Tensor, ...], config: HFConfig) -> Tensor:
    """E · Σ_e f_e · P_e over N tokens and L layers: f_e is how often expert e is among the chosen of a token, P_e its
    mean probability. It is the number of chosen experts where routers treat all experts alike.

    Args:
        router_logits: [N, E] of each layer.
        config: has `num_experts_per_tok`.
    """
    import torch

    logits = torch.cat(router_logits)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    probabilities = torch.softmax(logits.to(dtype), -1)
    chosen = probabilities.topk(config.num_experts_per_tok, dim=-1).indices
    num_experts = logits.shape[-1]
    often = chosen.flatten().bincount(minlength=num_experts).to(dtype) / len(logits)
    return num_experts * (often * probabilities.mean(0)).sum()


def router_statistics(router_logits: tuple[Tensor, ...], config: HFConfig) -> dict[str, Tensor]:
    """Sums over N tokens: their number, and N times these means over layers: the largest load of an expert over the
    mean load, the entropy of the loads over that of even ones, and the share of experts that no token took."""
    import torch

    found = []
    for logits in router_logits:
        chosen = logits.detach().topk(config.num_experts_per_tok, dim=-1).indices
        loads = chosen.flatten().bincount(minlength=logits.shape[-1]).to(torch.float64) / chosen.numel()
        entropy = torch.special.entr(loads).sum() / math.log(len(loads))
        found.append(torch.stack([loads.max() * len(loads), entropy, (loads == 0).double().mean()]))
    num_tokens = len(router_logits[0])
    most, entropy, idle = torch.stack(found).mean(0) * num_tokens
    tokens = torch.full_like(most, num_tokens)
    return {"router_tokens": tokens, "router_max_load": most, "router_entropy": entropy, "router_idle": idle}


def _coefficient(config: HFConfig) -> float:
    # As transformers: the option turns the loss on.
    return float(config.router_aux_loss_coef) if getattr(config, "output_router_logits", False) else 0.0


BALANCE = Auxiliary("output_router_logits", "router_logits", load_balancing, _coefficient, router_statistics)


def _chosen(output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    _, weights, ids = output
    return ids, weights


def _forced(router: Any, output: tuple[Tensor, Tensor, Tensor], ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output of a router, for other experts: their probabilities among all, or, as the model has it, among them."""
    import torch

    logits, weights, own = output
    chosen = torch.where(ids < 0, own, ids)
    found = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        found = found / found.sum(-1, keepdim=True)
    return logits, found.to(weights.dtype), chosen


SOFTMAX = Routing(_chosen, _forced)
"""Routers whose output is (logits, weights, ids), and whose weights are a softmax over all experts in float32."""
