"""Two optimizers for Megatron's layers, chosen by the ZeRO stage.

`Replicated` is torch's AdamW and runs anywhere. `Sharded` is Megatron's distributed optimizer, which only runs on CUDA.
With bfloat16 passes, both sum gradients and step in float32, and the module holds rounded copies of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from xray_runtime.engines.adamw import MOMENTS, clip_gradients, decay_groups
from xray_runtime.engines.trainers.megatron.model import MegatronLM
from xray_runtime.engines.training_config import TrainingConfig


class Replicated:
    """torch's AdamW: every data-parallel rank holds all optimizer states of its part, on CPU or CUDA."""

    def __init__(self, module: MegatronLM, training: TrainingConfig) -> None:
        self._grad_clip = training.grad_clip
        shared = module.shared_embedding_or_output_weight()
        # First and last pipeline stage have a copy each; both use the sum of their gradients.
        self._tied = shared if getattr(shared, "shared_embedding", False) and shared.requires_grad else None
        self._masters = {
            p: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for p in module.parameters()
            if p.requires_grad
        }
        """Trained parameter → the tensor that is stepped: itself, or its float32 copy."""
        for parameter, master in self._masters.items():
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(self._add_gradient)
        groups = decay_groups(module, training.weight_decay)
        for group in groups:
            group["params"] = [self._masters[parameter] for parameter in group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, foreach=True)
        for master in self._masters.values():
            # Adam's initial state, so that a snapshot can be loaded before the first step.
            self.optimizer.state[master] = {"step": torch.tensor(0.0)} | {
                key: torch.zeros_like(master) for key in MOMENTS
            }

    def _add_gradient(self, parameter: Tensor) -> None:
        """Add a micro-batch's gradient to the float32 sum."""
        assert isinstance(parameter, nn.Parameter)
        total = self._masters[parameter].grad
        assert parameter.grad is not None
        assert total is not None
        total.add_(parameter.grad)
        parameter.grad = None

    def begin(self) -> None:
        """Prepare for the gradients of a step."""
        # Zeros, not None: parameters without a gradient still decay, as under DeepSpeed.
        for master in self._masters.values():
            master.grad = torch.zeros_like(master)

    def apply(self, lr: float) -> float:
        """Sum gradients over data-parallel ranks, clip, step; returns the global norm before clipping.

        If the norm is not finite, nothing changes.
        """
        masters = self._masters.values()
        if self._tied is not None:
            dist.all_reduce(self._masters[self._tied].grad, group=parallel_state.get_embedding_group())
        for master in masters:
            dist.all_reduce(master.grad, group=parallel_state.get_data_parallel_group())
        norm = self._norm()
        if not norm.isfinite():
            return float(norm)
        clip_gradients(masters, self._grad_clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for parameter, master in self._masters.items():
            parameter.data.copy_(master.data)
        return float(norm)

    def _norm(self) -> Tensor:
        # Each parameter counts once.
        once = tensor_parallel.param_is_not_tensor_parallel_duplicate
        grads: Any = [master.grad for p, master in self._masters.items() if param_is_not_shared(p) and once(p)]
        square = torch.nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square, group=parallel_state.get_model_parallel_group())
        return square.sqrt()

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The float32 weights of a parameter."""
        return self._masters[parameter].data

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the weights, in the optimizer and in the module."""
        if parameter in self._masters:
            self._masters[parameter].data.copy_(value)
        parameter.data.copy_(value)

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """One of Adam's moments, in the parameter's shape."""
        state: Tensor = self.optimizer.state[self._masters[parameter]][key]
        return state

    def set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Set a moment, in the parameter's shape."""
        self.optimizer.state[self._masters[parameter]][key].copy_(value)

    def set_step(self, step: int) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(step)


class Sharded:
    """Megatron's distributed optimizer: each data-parallel rank steps its share of a flat buffer. CUDA only.

    Its methods do what those of `Replicated` do.
    """

    def __init__(self, module: MegatronLM, training: TrainingConfig) -> None:
        self._weight_decay = training.weight_decay
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self._ddp = DistributedDataParallel(module.config, ddp, module)
        config = OptimizerConfig(
            optimizer="adam",
            lr=training.lr,
            weight_decay=training.weight_decay,
            adam_beta1=training.betas[0],
            adam_beta2=training.betas[1],
            clip_grad=training.grad_clip,
            use_distributed_optimizer=True,
            bf16=module.config.bf16,
            params_dtype=module.config.params_dtype,
        )
        self.optimizer = get_megatron_optimizer(config, [self._ddp], use_gloo_process_groups=False)
        distributed = self.optimizer.chained_optimizers[0]
        self._adam = distributed.optimizer
        # Parameter → range of its elements that this rank steps, and Adam's view of them.
        self._shares: dict[nn.Parameter, tuple[slice, Tensor]] = {}
        for parameter, (group, place) in distributed.model_param_group_index_map.items():
            share = self._adam.param_groups[group]["params"][place]
            span = distributed._get_model_param_range_map(parameter)["param"]
            self._shares[parameter] = (slice(span.start, span.end), share)
            self._adam.state[share] = {"step": torch.tensor(0.0)} | {key: torch.zeros_like(share) for key in MOMENTS}

    def begin(self) -> None:
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def apply(self, lr: float) -> float:
        finalize_model_grads([self._ddp])
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, self._weight_decay * group["wd_mult"]
        # Its own step does not check float32 gradients.
        if self.optimizer.prepare_grads() or not math.isfinite(norm := float(self.optimizer.get_grad_norm())):
            return math.nan
        self.optimizer.step()
        return norm

    def value(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter.data
        return self._whole(parameter, lambda share: share)

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter in self._shares:
            where, share = self._shares[parameter]
            share.data.copy_(value.flatten()[where])
        parameter.data.copy_(value)

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        return self._whole(parameter, lambda share: self._adam.state[share][key])

    def _whole(self, parameter: nn.Parameter, part: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 numbers of all data-parallel ranks, each with `part` of its share, in the parameter's shape."""
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if parameter in self._shares:
            where, share = self._shares[parameter]
            whole[where] = part(share).detach()
        dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
        return whole.view_as(parameter)

    def set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        if parameter in self._shares:
            where, share = self._shares[parameter]
            self._adam.state[share][key].copy_(value.flatten()[where])

    def set_step(self, step: int) -> None:
        for state in self._adam.state.values():
            state["step"].fill_(step)
        for group in self._adam.param_groups:
            # Megatron uses Transformer Engine's Adam if it is installed, which counts here.
            group["step"] = step
