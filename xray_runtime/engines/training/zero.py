"""Training engine: DeepSpeed ZeRO 0 to 3 over data-parallel ranks, for whole models or slices of them.

The caller normalizes: micro-batch losses are divided by *global* counts and summed over micro-batches and ranks, so a
step does not depend on how a batch was split. DeepSpeed averages gradients over data-parallel ranks; the engine
multiplies that back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xray_runtime.config.engines import TrainingConfig
from xray_runtime.engines import states
from xray_runtime.engines.engine import MicroBatch
from xray_runtime.engines.shard_loading import Weights, load_shard
from xray_runtime.engines.training.deepspeed_setup import MOMENTS, communication, decay_groups, mixed_precision, offload
from xray_runtime.engines.training.mesh import Mesh
from xray_runtime.engines.training.scorer import PlainScorer
from xray_runtime.engines.training.tensor import join, sum_gradients
from xray_runtime.models.heads import HEAD_PREFIX, HeadedLM


class ZeroEngine(PlainScorer):
    """One rank of a model under DeepSpeed ZeRO.

    Args:
        module: this rank's part of the model; its weights are loaded here, and partitioned by ZeRO-3.
        training: optimizer settings and ZeRO stage. `training.lr` is a placeholder: each step has its own.
        weights: initial weights.
        device: device of this rank.
        mesh: mesh of the model's parts; None if every rank has a whole replica.
    """

    def __init__(
        self,
        module: HeadedLM,
        training: TrainingConfig,
        weights: Weights,
        device: torch.device,
        mesh: Mesh | None = None,
    ) -> None:
        import deepspeed

        self.stage = training.engine.zero
        self._mesh, self._splits, self._grad_clip = mesh, weights.splits, training.grad_clip
        self.writes = mesh.data_rank == mesh.tensor_rank == 0 if mesh else dist.get_rank() == 0
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": {
                "stage": self.stage,
                **communication(device.type, trained),
                **offload(training.engine),
            },
            "zero_allow_untested_optimizer": True,
            # torch's AdamW also steps offloaded states, with the same bits and without a C++ build.
            "zero_force_ds_cpu_optimizer": False,
            # With ZeRO 0 our hook below clips, since DeepSpeed's clipping does not report the norm.
            "gradient_clipping": training.grad_clip if self.stage else 0.0,
            "steps_per_print": 2**31,
            **mixed_precision(training.engine),
        }
        mixed = training.engine.precision != "float32"
        dtype = getattr(torch, training.engine.precision)
        load_shard(module, weights, device, dtype, _partition(config, dtype) if self.stage == 3 else None)
        if mesh is not None and mesh.topology.tensor > 1:
            sum_gradients(module, mesh)
        optimizer = torch.optim.AdamW(
            decay_groups(module, training.weight_decay), lr=training.lr, betas=training.betas, fused=True
        )
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, mpu=mesh
        )
        super().__init__(self.engine.module)
        self.data_parallel = training.engine.data_parallel
        self._norm = 0.0
        self._moments = self._init_moments()
        # DeepSpeed initializes float32 masters with rounded weights.
        for name, parameter in self._trained() if mixed else []:
            self._init_master(name, parameter, weights)
        if not self.stage:
            optimizer.register_step_pre_hook(lambda *_: self._clip())

    def _clip(self) -> None:
        # Each number counts once: parameters that all tensor-parallel peers hold count on the first peer.
        first = self._mesh is None or self._mesh.tensor_rank == 0
        trained = [(n, p) for n, p in self.module.named_parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for n, p in trained if first or n in self._splits])
        if self._mesh is not None:
            square = norm.square()
            dist.all_reduce(square, group=self._mesh.replica_group)
            norm = square.sqrt()
        self._norm = float(norm)
        if math.isfinite(self._norm):
            torch.nn.utils.clip_grads_with_norm_([p for _, p in trained], self._grad_clip, norm)
            return
        for _, parameter in trained:
            # AdamW skips parameters without a gradient, also for decay and step counts.
            parameter.grad = None

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        """Run `task(module, *args)` inside DeepSpeed's forward, which gathers sharded parameters."""
        return self.engine(task, *args)

    def step(self, loss: Callable[[MicroBatch], Tensor], batches: Iterable[MicroBatch], lr: float) -> float:
        for batch in batches:
            self.backward(loss(batch) * self.data_parallel)
        return self.apply(lr)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, which DeepSpeed averages over data-parallel ranks."""
        self.engine.backward(loss)

    def apply(self, lr: float) -> float:
        """Make an optimizer step with the accumulated gradients; returns their global norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        # ZeRO 1 to 3 skip a step whose norm is not finite, and then report infinity.
        norm = self.engine.get_global_grad_norm() if self.stage else self._norm
        return float(norm if norm is not None else math.nan)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        adapters = self.module.adapters
        for name, parameter in self._trained():
            plain = states.hugging_face_name(name)
            if adapters is None or plain.startswith(HEAD_PREFIX):
                yield plain, self._whole(name, self._value(parameter))
        if adapters is not None:
            yield from adapters.merged(self._value)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"stage-{self._mesh.stage if self._mesh else 0}.safetensors"
        shapes = {states.hugging_face_name(n): self._whole_shape(n, p) for n, p in self._trained()}
        step = int(self._moments[0]["step"])

        def whole() -> Iterator[tuple[str, str, Tensor]]:
            for name, parameter in self._trained():
                plain = states.hugging_face_name(name)
                yield states.WEIGHT, plain, self._whole(name, self._value(parameter))
                for key in MOMENTS:
                    yield key, plain, self._whole(name, self._moment(parameter, key))

        states.write(file if self.writes else None, shapes, (states.WEIGHT, *MOMENTS), step, whole())

    def load(self, directory: Path) -> None:
        with states.Reader(directory) as saved:
            for name, parameter in self._trained():
                plain, split = states.hugging_face_name(name), self._splits.get(name)
                rank = self._mesh.tensor_rank if self._mesh else 0
                self._set_value(parameter, saved.part(states.WEIGHT, plain, split, rank).to(parameter.device))
                for key in MOMENTS:
                    self._set_moment(parameter, key, saved.part(key, plain, split, rank).to(parameter.device))
            for moments in self._moments:
                moments["step"].fill_(saved.step)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._splits:
            return tensor
        assert self._mesh is not None
        return join(tensor, self._splits[name], self._mesh)

    def _whole_shape(self, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        if name in self._splits:
            shape[self._splits[name].dim] = sum(self._splits[name].sizes)
        return tuple(shape)

    def _adam(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _init_moments(self) -> list[dict[str, Tensor]]:
        # Adam keeps states by parameter, or by DeepSpeed's flat float32 partitions. They are made here, as zeros like
        # Adam's own, so that a snapshot can be loaded before the first step. (ZeRO 1 and 2 would link parameters to
        # them after the step of the first of several groups, too early for the others.)
        adam = self._adam()
        stepped = [tensor for group in adam.param_groups for tensor in group["params"]]
        tensors = self.optimizer.fp32_partitioned_groups_flat if self.stage == 3 else stepped
        state = adam.state
        for number, tensor in enumerate(tensors):
            swapped = self.stage == 3 and self.optimizer._swappable_optimizer_subgroup(number)
            if swapped:
                self.optimizer._optimizer_states_and_gradient_swap_in(number)
            state[tensor] = {key: torch.zeros_like(tensor) for key in MOMENTS}
            state[tensor]["step"] = torch.zeros((), device=tensor.device)
            if swapped:
                self.optimizer._optimizer_states_and_gradient_swap_out(number)
        if self.stage in (1, 2):
            self.optimizer._lazy_init_hp_params_optimizer_state()
        return [state[tensor] for tensor in tensors]

    def _value(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        # ZeRO 1 and 2 step float32 partitions and copy them to whole parameters.
        if self.stage < 3 and parameter.dtype == torch.float32:
            return parameter.data
        value: Tensor = safe_get_full_fp32_param(parameter)
        return value

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        state = self._adam().state
        moment: Tensor = safe_get_full_optimizer_state(parameter, key) if self.stage else state[parameter][key]
        return moment

    def _set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self.stage < 3:
            parameter.data.copy_(value)
            if self.stage:
                safe_set_full_fp32_param(parameter, value)
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
        safe_set_local_fp32_param(parameter, self._partition(parameter, value))

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if not self.stage:
            self._adam().state[parameter][key].copy_(value)
        elif self.stage < 3:
            safe_set_full_optimizer_state(parameter, value, key)
        else:
            safe_set_local_optimizer_state(parameter, self._partition(parameter, value), key)

    def _init_master(self, name: str, parameter: Any, weights: Weights) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self.stage < 3:
            safe_set_full_fp32_param(parameter, weights.value(name).to(parameter.device))
            return
        size = parameter.ds_tensor.ds_numel
        share = weights.share(name, size * dist.get_rank(), size)
        safe_set_local_fp32_param(parameter, share.to(parameter.device))

    def _partition(self, parameter: Any, value: Tensor) -> Tensor:
        # This rank's share of the flat tensor, padded as by ZeRO-3.
        size = parameter.ds_tensor.numel()
        flat = torch.nn.functional.pad(value.flatten(), (0, size * self.data_parallel - value.numel()))
        return flat.narrow(0, size * dist.get_rank(), size)


class ZeroScorer(PlainScorer):
    """One rank of a frozen model under ZeRO-3, with a share of every parameter.

    Args:
        module: the whole model, loaded and partitioned here.
        weights: its weights.
        device: device of this rank.
        dtype: type of its parameters and activations.
    """

    def __init__(self, module: HeadedLM, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 2**31}
        load_shard(module, weights, device, dtype, _partition(config, dtype))
        self._engine, *_ = deepspeed.initialize(model=module, config=config)
        super().__init__(self._engine.module)

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        """See `Scorer.forward`."""
        return self._engine(task, *args)


def _partition(config: dict[str, Any], dtype: torch.dtype) -> Callable[[nn.Parameter], None]:
    """A function that gives every rank its share of a parameter that is whole on rank 0, as `config` says."""
    import deepspeed

    init = deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype)

    def partition(parameter: nn.Parameter) -> None:
        init._convert_to_zero_parameters([parameter])

    return partition
