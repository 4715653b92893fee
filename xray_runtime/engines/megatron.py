"""Training engine: Megatron-core's tensor-parallel layers, pipeline schedules and distributed optimizer, for Llamas.

On CPU (gloo) it trains with tensor and data parallelism and torch's AdamW, through Megatron's own layers. Its pipeline
schedules and its distributed optimizer (ZeRO-1) allocate on CUDA whatever they are told, and run there alone.
`EngineConfig.cuda_only` says so before a run, `check_llama` before any group is made.

Losses and gradients are sums, as in `zero`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from xray_runtime.config import EngineConfig, TrainingConfig
from xray_runtime.engines import states
from xray_runtime.engines.engine import MicroBatch
from xray_runtime.engines.megatron_model import MegatronLM
from xray_runtime.engines.megatron_weights import Fused, llama
from xray_runtime.engines.topology import Topology
from xray_runtime.engines.zero import MOMENTS, decay_groups
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import sequences

PLAIN_ROPE = ("default", "linear", "llama3")
"""Rotary embeddings whose frequencies do not depend on the sequence."""


def check_llama(module: HeadedLM, engine: EngineConfig) -> None:
    """Raises ValueError where Megatron cannot train the model under this layout."""
    config, refused = module.lm.config, "engine.library: 'megatron' is not allowed"
    if module.has_trunk:
        raise ValueError(f"{refused} with base.trainable_layers: it trains whole models")
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise ValueError(f"{refused} for this {type(module.lm).__name__}: it takes Llamas without biases, with SiLU")
    if module.lm.model.rotary_emb.rope_type not in PLAIN_ROPE:
        raise ValueError(f"{refused} with the model's rotary embedding: it must be one of {', '.join(PLAIN_ROPE)}")
    tensor, stages = engine.tensor_parallel, engine.pipeline_parallel
    parts = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    if any(part % tensor for part in parts):
        raise ValueError(
            f"engine.tensor_parallel: {tensor} is not allowed: it must divide the model's {parts[0]} heads, {parts[1]} "
            f"key-value heads and intermediate size {parts[2]}"
        )
    if config.num_hidden_layers % stages:
        raise ValueError(
            f"engine.pipeline_parallel: {stages} is not allowed: with library 'megatron' it must divide the model's "
            f"{config.num_hidden_layers} layers"
        )
    if engine.cuda_only and next(module.parameters()).device.type == "cpu":
        raise ValueError(f"engine.{engine.cuda_only} is not allowed on CPU: Megatron-core runs it on CUDA alone")


class Updates(Protocol):
    """How gradients become an optimizer step, and where Adam keeps its moments."""

    def begin(self) -> None:
        """Make ready for the gradients of a step."""

    def apply(self, lr: float) -> float:
        """Sum gradients over data-parallel ranks, clip, step; returns the global norm before clipping."""

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """One of Adam's moments, in the parameter's shape."""

    def set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None: ...

    def set_step(self, step: int) -> None:
        """How many steps Adam has made."""


class MegatronEngine:
    """One rank of a Llama under Megatron-core.

    Args:
        module: the whole model; this rank's part of its weights is copied.
        training: optimizer settings and layout. `training.lr` is a placeholder: each step brings its own.
    """

    def __init__(self, module: HeadedLM, training: TrainingConfig) -> None:
        check_llama(module, training.engine)
        topology = Topology.of(training.engine)
        # Groups are global to the process, which may have held another model before.
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            topology.tensor, topology.pipeline, create_gloo_process_groups=False
        )
        rank, config = dist.get_rank(), module.lm.config
        self._tensor_rank, self._tensor_group = topology.tensor_rank(rank), parallel_state.get_tensor_model_parallel_group()
        self._stages, self._is_last = topology.pipeline, topology.stage(rank) == topology.pipeline - 1
        self._stage = topology.stage(rank)
        self.writes = topology.data_rank(rank) == self._tensor_rank == 0
        has_head = module.scalar is not None
        self.module: Any = MegatronLM(config, topology, module.lm.model.rotary_emb.inv_freq, scalar_head=has_head)
        self.module.to(next(module.parameters()).device).eval()
        layers = topology.layers(self._stage, config.num_hidden_layers)
        self._fused = llama(config, layers, topology.tensor, scalar=has_head)
        self._parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        assert self._parameters.keys() == self._fused.keys()
        pieces = {states.hugging_face_name(name): tensor for name, tensor in module.state_dict().items()}
        for name, fused in self._fused.items():
            parameter = self._parameters[name]
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, fused.dim is not None, fused.dim or 0, 1)
            self._set(name, parameter.data, [pieces[piece] for piece in fused.pieces])
        self._updates: Updates = (Sharded if training.engine.zero_stage else Replicated)(self.module, training)
        self._num_steps = 0

    @property
    def optimizer(self) -> Any:
        """What steps the parameters."""
        return self._updates.optimizer

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        """See `Engine.forward`."""
        return self.module(task, *args)

    def evaluate(self, task: Callable[..., Any], batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """See `Engine.evaluate`."""
        if self._stages == 1:
            for batch in batches:
                yield batch, self.forward(task, batch.tensors)
            return
        held = list(batches)
        scores = self._pipeline(lambda batch: self.forward(task, batch.tensors), held, forward_only=True)
        yield from zip(held, scores, strict=self._is_last)

    def step(self, loss: Callable[[MicroBatch], Tensor], batches: Iterable[MicroBatch], lr: float) -> float:
        """See `Engine.step`."""
        self._updates.begin()
        if self._stages == 1:
            for batch in batches:
                loss(batch).backward()
        else:
            self._pipeline(loss, list(batches), forward_only=False)
        self._num_steps += 1
        return self._updates.apply(lr)

    def _pipeline(self, task: Callable[[MicroBatch], Any], batches: list[MicroBatch], *, forward_only: bool) -> list[Any]:
        """Megatron's own 1F1B schedule; what `task` gave for each micro-batch, on the last stage of a forward pass."""

        def forward(coming: Iterator[MicroBatch], module: MegatronLM) -> tuple[Any, Any]:
            batch = next(coming)
            return task(batch) if self._is_last else module.states(sequences(batch.tensors)), result

        def result(out: Any, non_loss_data: bool = False) -> Any:
            # Of a loss also a token count, which would divide the sum of losses if it were asked for.
            return out if non_loss_data else (out, torch.zeros((), dtype=torch.int), {})

        scores: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[self.module],
            num_microbatches=len(batches),
            # Stages tell one another each micro-batch's shape.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return scores

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.weights`."""
        for name in self._owned():
            yield from self._whole(name, self._parameters[name].data)

    def save(self, directory: Path) -> None:
        """See `Engine.save`."""
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"stage-{self._stage}.safetensors" if self.writes else None
        owned = [self._fused[name] for name in self._owned()]
        shapes = {p: shape for fused in owned for p, shape in zip(fused.pieces, fused.shapes, strict=True)}

        def whole() -> Iterator[tuple[str, str, Tensor]]:
            for name in self._owned():
                parameter = self._parameters[name]
                held = {states.WEIGHT: parameter.data} | {key: self._updates.moment(parameter, key) for key in MOMENTS}
                for kind, tensor in held.items():
                    yield from ((kind, piece, value) for piece, value in self._whole(name, tensor))

        states.write(file, shapes, (states.WEIGHT, *MOMENTS), self._num_steps, whole())

    def load(self, directory: Path) -> None:
        """See `Engine.load`."""
        with states.Reader(directory) as saved:
            for name, fused in self._fused.items():
                parameter = self._parameters[name]
                for kind in (states.WEIGHT, *MOMENTS):
                    part = torch.empty_like(parameter)
                    self._set(name, part, [saved.part(kind, piece, None, 0) for piece in fused.pieces])
                    if kind == states.WEIGHT:
                        parameter.data.copy_(part)
                    else:
                        self._updates.set_moment(parameter, kind, part)
            self._num_steps = saved.step
            self._updates.set_step(saved.step)

    def _owned(self) -> list[str]:
        return [name for name, fused in self._fused.items() if not fused.borrowed]

    def _set(self, name: str, part: Tensor, pieces: list[Tensor]) -> None:
        part.copy_(self._fused[name].part(pieces, self._tensor_rank, self._tensor_group.size()))

    def _whole(self, name: str, part: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor)s of a parameter of which every tensor-parallel peer brings its part."""
        fused, parts = self._fused[name], [part]
        if fused.dim is not None and self._tensor_group.size() > 1:
            parts = [torch.empty_like(part) for _ in range(self._tensor_group.size())]
            dist.all_gather(parts, part.contiguous(), group=self._tensor_group)
        yield from zip(fused.pieces, fused.whole(parts), strict=True)


class Replicated:
    """Every data-parallel rank holds all of its part's optimizer states: torch's AdamW, on CPU and CUDA alike."""

    def __init__(self, module: MegatronLM, training: TrainingConfig) -> None:
        self._module, self._grad_clip = module, training.grad_clip
        self.optimizer = torch.optim.AdamW(
            decay_groups(module, training.weight_decay), lr=training.lr, betas=training.betas, foreach=True
        )
        for parameter in module.parameters():
            # As Adam itself begins: a snapshot can then be loaded before the first step.
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0)} | {
                key: torch.zeros_like(parameter) for key in MOMENTS
            }

    def begin(self) -> None:
        self.optimizer.zero_grad()

    def apply(self, lr: float) -> float:
        self._tie()
        trained = [p for p in self._module.parameters() if p.grad is not None]
        for parameter in trained:
            dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
        # Each number of the model counts once.
        mine = [p for p in trained if param_is_not_shared(p) and tensor_parallel.param_is_not_tensor_parallel_duplicate(p)]
        square = torch.nn.utils.get_total_norm([p.grad for p in mine]).square()
        dist.all_reduce(square, group=parallel_state.get_model_parallel_group())
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(trained, self._grad_clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return float(norm)

    def _tie(self) -> None:
        """Give both copies of an embedding that first and last pipeline stage share the sum of their gradients."""
        weight = self._module.shared_embedding_or_output_weight()
        if weight is None or not getattr(weight, "shared_embedding", False):
            return
        if weight.grad is None:
            # A value loss alone does not touch the output layer.
            weight.grad = torch.zeros_like(weight)
        dist.all_reduce(weight.grad, group=parallel_state.get_embedding_group())

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        state: Tensor = self.optimizer.state[parameter][key]
        return state

    def set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        self.optimizer.state[parameter][key].copy_(value)

    def set_step(self, step: int) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(step)


class Sharded:
    """Megatron's distributed optimizer: each data-parallel rank steps its share of a flat buffer. On CUDA alone."""

    def __init__(self, module: MegatronLM, training: TrainingConfig) -> None:
        self._weight_decay = training.weight_decay
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self._ddp = DistributedDataParallel(module.config, ddp, module)
        config = OptimizerConfig(
            optimizer="adam",
            lr=training.lr,
            weight_decay=training.weight_decay,
            adam_beta1=training.betas[0],
            adam_beta2=training.betas[1],
            clip_grad=training.grad_clip,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(config, [self._ddp], use_gloo_process_groups=False)
        distributed = self.optimizer.chained_optimizers[0]
        self._adam = distributed.optimizer
        self._shares: dict[nn.Parameter, tuple[slice, Tensor]] = {}
        for parameter, (group, place) in distributed.model_param_group_index_map.items():
            share, span = self._adam.param_groups[group]["params"][place], distributed._get_model_param_range_map(parameter)
            self._shares[parameter] = (slice(span["param"].start, span["param"].end), share)
            self._adam.state[share] = {"step": torch.tensor(0.0)} | {key: torch.zeros_like(share) for key in MOMENTS}

    def begin(self) -> None:
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def apply(self, lr: float) -> float:
        finalize_model_grads([self._ddp])
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, self._weight_decay * group["wd_mult"]
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        whole = torch.zeros_like(parameter.data).flatten()
        if parameter in self._shares:
            where, share = self._shares[parameter]
            whole[where] = self._adam.state[share][key]
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
            # Where Transformer Engine's Adam counts, which Megatron takes where it is installed.
            group["step"] = step
