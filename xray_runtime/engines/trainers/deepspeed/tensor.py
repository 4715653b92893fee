"""Tensor parallelism: DeepSpeed AutoTP splits a model's linear layers by the plan of its Hugging Face class.

Column-parallel layers hold rows of their matrix, row-parallel ones columns; norms, embeddings and heads are whole on
every peer. AutoTP is called directly with our own groups: its config key would make groups without a pipeline. Of a
mixture's experts each peer holds its own, and computes for all tokens what these add to the result.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xray_runtime.engines.shard_loading import Split
from xray_runtime.engines.trainers.deepspeed.mesh import Mesh
from xray_runtime.models.adapters import Adapters, joined_norms
from xray_runtime.models.experts import expert_modules, keep_own, of_pairs, summed
from xray_runtime.models.family import Heads
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.lora import EXPERTS


def check_split(lm: Any, degree: int, field: str) -> None:
    """Raises ValueError if `lm` cannot be split over `degree` peers, as `field` requires."""
    refused = f"{field}.tensor_parallel: {degree} is not allowed"
    config = lm.config
    heads = Heads.of(config)
    if heads.queries % degree or heads.keys % degree:
        raise ValueError(
            f"{refused}: it must divide the model's {heads.queries} heads and {heads.keys} key-value heads"
        )
    if not getattr(config, "base_model_tp_plan", None):
        raise ValueError(f"{refused}: a {type(lm).__name__} has no tensor-parallel plan")
    if wrong := next((e.num_experts for _, e in expert_modules(lm) if e.num_experts % degree), None):
        raise ValueError(f"{refused}: it must divide the model's {wrong} experts")
    try:
        _layer_specs(lm)
    except ValueError as error:
        styles = str(error).partition(". ")[0]  # the rest is advice on a key that X-ray does not give DeepSpeed
        raise ValueError(f"{refused} for a {type(lm).__name__} ({styles})") from error


def _layer_specs(lm: Any) -> Any:
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    plan = _get_hf_tp_plan(lm)
    if any(expert_modules(lm)):
        # Its styles for experts, which AutoTP does not have, split each of them.
        plan = {name: style for name, style in plan.items() if EXPERTS not in name.split(".")}
    return TPPlanConverter.convert(plan)


def split_layers(module: HeadedLM, mesh: Mesh, device: torch.device) -> dict[str, Split]:
    """Replace the module's linear layers by this rank's slices; returns parameter name → split.

    The model has passed `check_split` and may be a skeleton. `device` is the device of the mesh's groups.
    """
    degree = mesh.topology.tensor
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    with module.adapters.taken_out() if module.adapters is not None else nullcontext():
        _autotp(module, mesh)._replace_module(module)
    if module.adapters is not None:
        _split_adapters(module.adapters, mesh)
    for _, experts in expert_modules(module):
        own = keep_own(experts, mesh.tensor_rank, degree)
        experts.forward = _OwnExperts(experts, experts.forward, own * mesh.tensor_rank, mesh.tensor_group)
    splits = {}
    for name, parameter in module.named_parameters():
        dims = [d for d, (whole, part) in enumerate(zip(shapes[name], parameter.shape, strict=True)) if whole != part]
        if dims:
            sizes = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(degree)]
            dist.all_gather(sizes, torch.tensor(parameter.shape[dims[0]], device=device), group=mesh.tensor_group)
            splits[name] = Split(dims[0], tuple(int(size) for size in sizes))
    return splits


def _split_adapters(adapters: Adapters, mesh: Mesh) -> None:
    """Give each peer its slice of the adapters: rows of B, and of DoRA's norms, beside rows of a matrix, whose A x is
    the same on all peers; columns of A beside columns, whose A x are summed."""
    from deepspeed.module_inject.layers import ColumnParallel, LinearAllreduce, LinearLayer, RowParallel

    for layer in adapters.layers.values():
        base = layer.base_layer
        if isinstance(base, LinearLayer | LinearAllreduce):
            by_rows = isinstance(base, LinearLayer)
            sizes = base._partition_sizes
            low = sum(sizes[: mesh.tensor_rank])

            def own(whole: Tensor, dim: int = 0 if by_rows else 1, low: int = low, sizes: Any = sizes) -> Tensor:
                return whole.narrow(dim, low, sizes[mesh.tensor_rank]).contiguous()

            part = layer.lora_B.weight if by_rows else layer.lora_A.weight
            part.data = own(part.data)
            if layer.magnitude is not None and by_rows:
                layer.magnitude.data = own(layer.magnitude.data)
            elif layer.magnitude is not None:
                layer.over_columns = functools.partial(joined_norms, mesh.tensor_group)
            if layer.start_A is not None and by_rows:
                layer.start_B = own(layer.start_B)
            elif layer.start_A is not None:
                layer.start_A = own(layer.start_A)
            apply = ColumnParallel.apply if by_rows else functools.partial(_summed, RowParallel)
            layer.between = functools.partial(apply, mesh.tensor_group)


class _OwnExperts:
    """The forward pass of this peer's experts, from number `first` on, summed over peers."""

    def __init__(self, experts: Any, compute: Any, first: int, group: Any) -> None:
        self._experts, self._compute, self._first, self._group = experts, compute, first, group

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum [N, H] of the results of K experts, for tokens [N, H], their experts [N, K] and weights."""
        from deepspeed.module_inject.layers import ColumnParallel, RowParallel

        # Peers have the same tokens; what flows back to these and to the weights is summed over them.
        states = ColumnParallel.apply(self._group, hidden_states)
        weights = ColumnParallel.apply(self._group, top_k_weights).flatten()
        chosen = top_k_index.flatten() - self._first
        pairs = ((chosen >= 0) & (chosen < self._experts.num_experts)).nonzero().flatten()
        token = pairs // top_k_index.shape[1]
        made = of_pairs(self._experts, self._compute, states[token], chosen[pairs])
        return _summed(RowParallel, self._group, summed(made, weights[pairs], token, states))


def _summed(row_parallel: Any, group: Any, low: Tensor) -> Tensor:
    summed: Tensor = row_parallel.apply(group, low, False)
    return summed


def sum_gradients(module: HeadedLM, mesh: Mesh) -> None:
    """Sum gradients of whole parameters that only see a slice of the activations (Qwen3's head norms)."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            # AutoTP's mark of those with a hook, which frozen ones cannot have.
            cast("Any", parameter)._ds_grad_allreduce_registered = True
    _autotp(module, mesh).register_replicated_grad_hooks(module)


def _autotp(module: HeadedLM, mesh: Mesh) -> Any:
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig

    set_autotp_mode(training=True)
    autotp = AutoTP(
        module=module,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=AutoTPConfig(tp_size=mesh.topology.tensor, layer_specs=_layer_specs(module.lm)),
        model_config=module.lm.config,
        training_mode=True,
    )
    # Its setter would use DeepSpeed's own groups.
    autotp.mp_size, autotp.mp_group = mesh.topology.tensor, mesh.tensor_group
    autotp.update_linear_policies()
    return autotp


def join(part: Tensor, split: Split, mesh: Mesh) -> Tensor:
    """Gather the whole tensor from the `part` of every tensor-parallel peer."""
    widest, own = max(split.sizes), split.sizes[mesh.tensor_rank]
    shape = list(part.shape)
    if split.dim == 0 and min(split.sizes) == widest:
        # Rows go where they belong, without a second copy of all.
        whole = part.new_empty((sum(split.sizes), *shape[1:]))
        dist.all_gather(list(whole.split(widest)), part.contiguous(), group=mesh.tensor_group)
        return whole
    shape[split.dim] = widest - own
    # all_gather needs equal parts, so all are padded to the widest.
    padded = torch.cat([part, part.new_zeros(shape)], dim=split.dim).contiguous()
    parts = [torch.empty_like(padded) for _ in split.sizes]
    dist.all_gather(parts, padded, group=mesh.tensor_group)
    return torch.cat([p.narrow(split.dim, 0, size) for p, size in zip(parts, split.sizes, strict=True)], dim=split.dim)
