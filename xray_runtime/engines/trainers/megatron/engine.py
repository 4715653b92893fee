"""Training engine: Megatron-core's tensor-parallel layers, pipeline schedules and distributed optimizer, for Llamas.

On CPU (gloo) it trains with tensor and data parallelism and torch's AdamW. Megatron's pipeline schedules and its
distributed optimizer (ZeRO-1) always allocate on CUDA; a run that needs them on CPU fails before it starts
(`TrainerCapabilities.on_cpu`).

Losses and gradients are sums, as in `zero`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from xray_runtime.engines import states
from xray_runtime.engines.adamw import MOMENTS
from xray_runtime.engines.adapted_stages import check_adapted_stages
from xray_runtime.engines.engine import MicroBatch, Scorer
from xray_runtime.engines.topology import Topology
from xray_runtime.engines.trainers.megatron.adapters import adapt
from xray_runtime.engines.trainers.megatron.model import MegatronLM
from xray_runtime.engines.trainers.megatron.optimizers import Replicated, Sharded
from xray_runtime.engines.trainers.megatron.weights import check_llama, llama
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.store.shards import Piece
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import sequences
from xray_runtime.models.padding import pad
from xray_runtime.models.weight_files import HEAD_PREFIX, read_tensor, weight_files


class MegatronEngine(Scorer):
    """One rank of a Llama under Megatron-core.

    Args:
        module: the model or its skeleton; this rank's part of the weights is copied.
        training: optimizer settings and layout. `training.lr` is a placeholder: each step has its own.
        checkpoint: source of a skeleton's weights.
    """

    def __init__(self, module: HeadedLM, training: TrainingConfig, checkpoint: Path, device: torch.device) -> None:
        check_llama(module, training.engine)
        topology = Topology.of(training.engine)
        check_adapted_stages(module, topology.pipeline, "engine")
        # Groups are global in the process, which may have held another model before.
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(topology.tensor, topology.pipeline, create_gloo_process_groups=False)
        rank, config, has_head = dist.get_rank(), module.lm.config, module.scalar is not None
        self._stage, data_rank, self._tensor_rank = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        # Rows are scattered by our grid, so Megatron's must be the same.
        assert rank == topology.rank(self._stage, data_rank, self._tensor_rank)
        self._num_stages, self._peers = topology.pipeline, parallel_state.get_tensor_model_parallel_group()
        self.turn = data_rank * topology.tensor + self._tensor_rank, topology.data * topology.tensor
        dtype = getattr(torch, training.engine.precision)
        inv_freq = module.lm.model.rotary_emb.inv_freq
        super().__init__(MegatronLM(config, topology, inv_freq, scalar_head=has_head, dtype=dtype).to(device).eval())
        layers = topology.layers(self._stage, config.num_hidden_layers)
        given = {states.hugging_face_name(name): tensor for name, tensor in module.state_dict().items()}
        self._fused = llama(config, layers, topology.tensor, scalar=has_head)
        if module.adapters is not None:
            self._fused |= adapt(self.module, module.adapters, self._fused, self._peers)
            self.module.adapters = module.adapters
        self._parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        assert self._parameters.keys() == self._fused.keys()
        files = weight_files(checkpoint)
        for name, fused in self._fused.items():
            # Megatron's norms use these.
            is_split, dim = fused.dim is not None, fused.dim or 0
            tensor_parallel.set_tensor_model_parallel_attributes(self._parameters[name], is_split, dim, 1)
        self._updates: Replicated | Sharded = (Sharded if training.engine.sharding_level else Replicated)(
            self.module, training
        )
        self.optimizer = self._updates.optimizer
        for name, parameter in self._parameters.items():
            slices = [
                read_tensor(files, plain, piece.dim, piece.low, piece.high)
                if given[plain].is_meta
                else given[plain].narrow(piece.dim, piece.low, piece.high - piece.low)
                for plain, piece in self._slices(name)
            ]
            self._updates.set_value(parameter, self._join(name, slices))
        self._num_steps = 0

    def evaluate(self, task: Callable[..., Any], batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        if self._num_stages == 1:
            yield from super().evaluate(task, batches)
            return
        held = list(batches)
        scores = self._pipeline(lambda batch: self.forward(task, batch.tensors), held, forward_only=True)
        yield from zip(held, scores, strict=self.module.post_process)

    def step(self, loss: Callable[[MicroBatch], Tensor], batches: Iterable[MicroBatch], lr: float) -> float:
        self._updates.begin()
        if self._num_stages == 1:
            for batch in batches:
                loss(batch).backward()
        else:
            self._pipeline(loss, list(batches), forward_only=False)
        norm = self._updates.apply(lr)
        self._num_steps += math.isfinite(norm)
        return norm

    def _pipeline(
        self, task: Callable[[MicroBatch], Any], batches: list[MicroBatch], *, forward_only: bool
    ) -> list[Any]:
        """Run Megatron's 1F1B schedule; returns the result of `task` for each micro-batch on the last stage."""

        def forward(coming: Iterator[MicroBatch], module: MegatronLM) -> tuple[Any, Any]:
            batch = next(coming)
            ids = sequences(batch.tensors).input_ids
            return task(batch) if module.post_process else module.states(pad(ids.values, ids.lengths)), result

        def result(out: Any, non_loss_data: bool = False) -> Any:
            # A loss comes with a token count, which Megatron does not use here.
            return out if non_loss_data else (out, torch.zeros((), dtype=torch.int), {})

        scores: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[self.module],
            num_microbatches=len(batches),
            # Stages send each other the shape of each micro-batch.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return scores

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        adapters = self.module.adapters
        for name in self._owned():
            if adapters is None or self._fused[name].pieces[0].startswith(HEAD_PREFIX):
                yield from self._whole(name, self._updates.value(self._parameters[name]))
        if adapters is not None:
            own = {self._fused[name].pieces[0]: name for name in self._owned()}

            def whole(plain: str, parameter: nn.Parameter) -> Tensor:
                ((_, tensor),) = self._whole(own[states.hugging_face_name(plain)], self._updates.value(parameter))
                return tensor

            yield from adapters.merged(whole) if merged else adapters.unmerged(whole)

    def save(self, directory: Path) -> None:
        # Data-parallel ranks hold the same and divide it; so do peers with tensors that each holds whole.
        data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        written, sources = {}, {}
        for name in self._owned():
            for number, (plain, piece) in enumerate(self._slices(name)):
                if self._fused[name].dim is None:
                    piece = states.share(piece, self._tensor_rank, self._peers.size())
                written[plain], sources[plain] = states.share(piece, data_rank, data_size), (name, number)

        def read(kind: str, plain: str) -> Tensor:
            (name, number), piece = sources[plain], written[plain]
            updates, parameter = self._updates, self._parameters[name]
            part = updates.value(parameter) if kind == states.WEIGHT else updates.moment(parameter, kind)
            slices = self._fused[name].split(part, self._tensor_rank, self._peers.size())
            return slices[number].flatten()[piece.start : piece.stop]

        pieces = {(kind, plain): piece for plain, piece in written.items() for kind in (states.WEIGHT, *MOMENTS)}
        states.write(directory, dist.get_rank(), pieces, self._num_steps, read)

    def load(self, directory: Path) -> None:
        with states.Reader(directory) as saved:
            for name in self._trained():
                parameter = self._parameters[name]
                for kind in (states.WEIGHT, *MOMENTS):
                    found = [
                        saved.read(kind, plain, piece).view(piece.box_shape) for plain, piece in self._slices(name)
                    ]
                    part = self._join(name, found)
                    if kind == states.WEIGHT:
                        self._updates.set_value(parameter, part)
                    else:
                        self._updates.set_moment(parameter, kind, part)
            self._num_steps = saved.step
            self._updates.set_step(saved.step)

    def _owned(self) -> list[str]:
        return [name for name in self._trained() if not self._fused[name].borrowed]

    def _trained(self) -> list[str]:
        return [name for name, parameter in self._parameters.items() if parameter.requires_grad]

    def _slices(self, name: str) -> list[tuple[str, Piece]]:
        """(Hugging Face name, this rank's slice) of each tensor in a parameter."""
        fused = self._fused[name]
        spans = fused.spans(self._tensor_rank, self._peers.size())
        pieces = zip(fused.pieces, fused.shapes, spans, strict=True)
        return [(plain, Piece.of(shape, fused.dim or 0, span)) for plain, shape, span in pieces]

    def _join(self, name: str, slices: list[Tensor]) -> Tensor:
        return self._fused[name].join(slices, self._peers.size())

    def _whole(self, name: str, part: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor)s of a parameter, gathered from the tensor-parallel peers."""
        fused, parts = self._fused[name], [part]
        if fused.dim is not None and self._peers.size() > 1:
            parts = [torch.empty_like(part) for _ in range(self._peers.size())]
            dist.all_gather(parts, part.contiguous(), group=self._peers)
        yield from zip(fused.pieces, fused.whole(parts), strict=True)
