"""Training engine: DeepSpeed ZeRO 0 to 3 over data-parallel ranks, for whole models or slices of them.

The caller normalizes: micro-batch losses are divided by *global* counts and summed over micro-batches and ranks, so a
step does not depend on how a batch was split. DeepSpeed averages gradients over data-parallel ranks; the engine
multiplies that back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xray_runtime.engines import states
from xray_runtime.engines.adamw import MOMENTS, clip_gradients, decay_groups
from xray_runtime.engines.engine import MicroBatch, Scorer, whole_weights
from xray_runtime.engines.shard_loading import Weights, load_shard
from xray_runtime.engines.threads import add_gradients
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.engines.trainers.deepspeed.mesh import Mesh
from xray_runtime.engines.trainers.deepspeed.setup import (
    ZeroPartition,
    communication,
    mixed_precision,
    offload,
    release_model,
)
from xray_runtime.engines.trainers.deepspeed.tensor import join, sum_gradients
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.store.shards import Piece
from xray_runtime.models.heads import HeadedLM


class ZeroEngine(Scorer):
    """One rank of a model under DeepSpeed ZeRO.

    Args:
        module: this rank's part of the model; its weights are loaded here, and partitioned by ZeRO-3.
        training: optimizer settings. `training.lr` is a placeholder: each step has its own.
        layout: `training.engine`.
        mesh: mesh of the model's parts; None if every rank has a whole replica.
    """

    def __init__(
        self,
        module: HeadedLM,
        training: TrainingConfig,
        layout: DeepSpeedConfig,
        weights: Weights,
        device: torch.device,
        mesh: Mesh | None,
    ) -> None:
        import deepspeed

        self.stage, self._on_disk = layout.sharding_level, layout.offload == "nvme"
        self._mesh, self._splits, self._grad_clip = mesh, weights.splits, training.grad_clip
        self.turn = mesh.turn if mesh is not None else (dist.get_rank(), dist.get_world_size())
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": {
                "stage": self.stage,
                **communication(device.type, trained),
                **offload(layout),
            },
            "zero_allow_untested_optimizer": True,
            # torch's AdamW also steps offloaded states, with the same bits and without a C++ build.
            "zero_force_ds_cpu_optimizer": False,
            # With ZeRO 0 our hook below clips, since DeepSpeed's clipping does not report the norm.
            "gradient_clipping": training.grad_clip if self.stage else 0.0,
            "steps_per_print": 2**31,
            **mixed_precision(layout),
        }
        mixed, dtype = layout.precision != "float32", getattr(torch, layout.precision)
        load_shard(module, weights, device, dtype, ZeroPartition(config, dtype) if self.stage == 3 else None)
        if self.stage == 3:
            _gather_for_norms(module)
        if mesh is not None and mesh.topology.tensor > 1:
            sum_gradients(module, mesh)
            for name, parameter in module.named_parameters():
                # ZeRO 1 and 2 count parameters without this mark on the first peer alone. AutoTP marks linear layers.
                cast("Any", parameter).tensor_model_parallel = name in self._splits
        optimizer = torch.optim.AdamW(
            decay_groups(module, training.weight_decay), lr=training.lr, betas=training.betas, fused=True
        )
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, mpu=mesh
        )
        # The hooks of ZeRO 1 to 3 and of mixed precision see one backward pass at a time.
        threaded = device.type == "cpu" and not self.stage and not mixed and mesh is None
        threaded = threaded and layout.sequence_parallel == 1
        super().__init__(self.engine.module, threaded)
        self._trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self.num_copies = layout.num_copies
        self._norm, self._moments = 0.0, self._init_moments()
        # DeepSpeed initializes float32 masters with rounded weights.
        for name, parameter in self._trained if mixed else []:
            self._init_master(name, parameter, weights)
        if not self.stage:
            # Without peers DeepSpeed would still copy all gradients into a buffer and back.
            self.engine.enable_backward_allreduce = self.num_copies > 1
            optimizer.register_step_pre_hook(lambda *_: self._clip())

    def _clip(self) -> None:
        for _, parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # Each number counts once: parameters that all tensor-parallel peers hold count on the first peer.
        first = self._mesh is None or self._mesh.tensor_rank == 0
        gradients = [p.grad for n, p in self._trained if p.grad is not None and (first or n in self._splits)]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._mesh is not None:
            square = norm.square()
            dist.all_reduce(square, group=self._mesh.replica_group)
            norm = square.sqrt()
        self._norm = float(norm)
        if math.isfinite(self._norm):
            clip_gradients([p for _, p in self._trained], self._grad_clip, norm)
            return
        for _, parameter in self._trained:
            # AdamW skips parameters without a gradient, also for decay and step counts.
            parameter.grad = None

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        """Run `task(module, *args)` inside DeepSpeed's forward, which gathers sharded parameters."""
        return (self.module if self.threaded else self.engine)(task, *args)

    def close(self) -> None:
        release_model(self.engine)

    def step(self, loss: Callable[[MicroBatch], Tensor], batches: Iterable[MicroBatch], lr: float) -> float:
        if self.threaded:
            add_gradients(lambda batch: loss(batch) * self.num_copies, [p for _, p in self._trained], batches)
        else:
            for batch in batches:
                self.backward(loss(batch) * self.num_copies)
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

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_weights(self.module, self._trained, self._whole, merged=merged)

    def save(self, directory: Path) -> None:
        held = {states.hugging_face_name(name): (name, parameter) for name, parameter in self._trained}
        written = {plain: self._written(*named) for plain, named in held.items()}

        def read(kind: str, plain: str) -> Tensor:
            parameter, piece = held[plain][1], written[plain]
            start, _ = self._range(parameter)
            return self._own(parameter, kind)[piece.start - start : piece.stop - start]

        step = int(self._moments[0]["step"])
        pieces = {(kind, plain): piece for plain, piece in written.items() for kind in (states.WEIGHT, *MOMENTS)}
        states.write(directory, dist.get_rank(), pieces, step, read)

    def load(self, directory: Path) -> None:
        with states.Reader(directory) as saved:
            for name, parameter in self._trained:
                plain, whole = states.hugging_face_name(name), self._slice(name, parameter)
                own = whole.between(*self._range(parameter))
                for kind in (states.WEIGHT, *MOMENTS):
                    value = saved.read(kind, plain, own)
                    self._set_own(parameter, kind, value)
                    if self.stage == 3 and kind == states.WEIGHT:
                        self._set_shard(parameter, value, functools.partial(saved.read, kind, plain, whole))
            for moments in self._moments:
                moments["step"].fill_(saved.step)
        if self.stage in (1, 2):
            # Each rank has read its partition of the masters; this gives all weights to all.
            self.optimizer.update_lp_params()

    def _whole(self, name: str, parameter: nn.Parameter) -> Tensor:
        value = self._value(parameter)
        if name not in self._splits:
            return value
        assert self._mesh is not None
        return join(value, self._splits[name], self._mesh)

    def _slice(self, name: str, parameter: nn.Parameter) -> Piece:
        """This tensor-parallel rank's slice of a parameter."""
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        if name not in self._splits:
            return Piece.of(tuple(shape))
        assert self._mesh is not None
        split, rank = self._splits[name], self._mesh.tensor_rank
        shape[split.dim] = sum(split.sizes)
        low = sum(split.sizes[:rank])
        return Piece.of(tuple(shape), split.dim, (low, low + split.sizes[rank]))

    def _range(self, parameter: Any) -> tuple[int, int]:
        """(first element, end) of the flattened parameter, of which this rank has master and moments."""
        if not self.stage:
            return 0, parameter.numel()
        if self.stage < 3:
            held = parameter._hp_mapping
            place = None if held is None else held.lp_fragment_address
            return (0, 0) if place is None else (place.start, place.start + place.numel)
        size, whole = parameter.ds_tensor.ds_numel, parameter.ds_numel
        return min(size * dist.get_rank(), whole), min(size * (dist.get_rank() + 1), whole)

    def _written(self, name: str, parameter: nn.Parameter) -> Piece:
        """The piece of a parameter that this rank writes: ranks that hold the same divide it."""
        piece, mesh = self._slice(name, parameter).between(*self._range(parameter)), self._mesh
        if mesh is not None and name not in self._splits:
            piece = states.share(piece, mesh.tensor_rank, mesh.topology.tensor)
        if not self.stage:
            data_rank = mesh.data_rank if mesh is not None else dist.get_rank()
            piece = states.share(piece, data_rank, self.num_copies)
        return piece

    def _own(self, parameter: Any, kind: str) -> Tensor:
        """This rank's `_range` of a weight's master or of a moment, flattened."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        weight = kind == states.WEIGHT
        if not self.stage:
            whole: Tensor = parameter.data if weight else self._adam().state[parameter][kind]
            return whole.view(-1)
        if self.stage < 3:
            held = parameter._hp_mapping
            part = parameter.data.new_empty(0) if held is None else held.get_hp_fragment(None if weight else kind)
            flat: Tensor = part.data.view(-1)
            return flat
        start, stop = self._range(parameter)
        own: Tensor = (
            safe_get_local_fp32_param(parameter) if weight else safe_get_local_optimizer_state(parameter, kind)
        )
        return own[: stop - start]

    def _set_own(self, parameter: Any, kind: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        if self.stage < 3:
            self._own(parameter, kind).copy_(value)
            return
        padded = self._padded(parameter, value)
        if kind == states.WEIGHT:
            safe_set_local_fp32_param(parameter, padded)
        else:
            safe_set_local_optimizer_state(parameter, padded, kind)

    def _set_shard(self, parameter: Any, own: Tensor, whole: Callable[[], Tensor]) -> None:
        """Set the weight that ZeRO-3 computes with to this rank's share, or to the whole one."""
        import deepspeed

        if not parameter.ds_persist and not self._on_disk:
            parameter.ds_tensor.data.copy_(self._padded(parameter, own))
            return
        # Small parameters stay whole on every rank, and those on disk are only written when they are sharded again.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if not dist.get_rank():
                parameter.data.copy_(whole().view(parameter.ds_shape))

    def _padded(self, parameter: Any, value: Tensor) -> Tensor:
        return nn.functional.pad(value, (0, parameter.ds_tensor.ds_numel - value.numel())).to(parameter.device)

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

    def _init_master(self, name: str, parameter: Any, weights: Weights) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self.stage < 3:
            safe_set_full_fp32_param(parameter, weights.value(name).to(parameter.device))
            return
        size = parameter.ds_tensor.ds_numel
        share = weights.share(name, size * dist.get_rank(), size)
        safe_set_local_fp32_param(parameter, share.to(parameter.device))


def _gather_for_norms(module: HeadedLM) -> None:
    """Have ZeRO-3 keep the matrices of a layer gathered while DoRA takes their norm."""
    import deepspeed

    for layer in module.adapters.layers.values() if module.adapters is not None else ():
        if layer.magnitude is not None:
            for part in (layer.base_layer, layer.lora_A, layer.lora_B):
                deepspeed.zero.register_external_parameter(layer, part.weight)


class ZeroScorer(Scorer):
    """One rank of a frozen model under ZeRO-3, which loads and partitions the whole `module`."""

    def __init__(self, module: HeadedLM, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 2**31}
        load_shard(module, weights, device, dtype, ZeroPartition(config, dtype))
        _gather_for_norms(module)
        self._engine, *_ = deepspeed.initialize(model=module, config=config)
        super().__init__(self._engine.module)

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        return self._engine(task, *args)

    def close(self) -> None:
        release_model(self._engine)
