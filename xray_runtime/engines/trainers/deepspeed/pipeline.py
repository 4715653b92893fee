"""Pipeline parallelism: each rank holds some layers; hidden states go up, their gradients come down (1F1B).

Micro-batches are ragged, and every stage knows their shapes from the rows. The schedules of
`torch.distributed.pipelining` need one shape for all, so this is a small schedule of our own: a stage's backward pass
is DeepSpeed's, of Σ output · gradient. ZeRO and tensor parallelism work inside a stage as usual.

A tied embedding belongs to the first stage. The last stage has a copy: the embedding is sent up after every step, and
the copy's gradient is sent down before the end of a step, where it is added as one more loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xray_runtime.data.batch import TextBatch
from xray_runtime.engines.adapted_stages import check_adapted_stages
from xray_runtime.engines.engine import MicroBatch, Scorer
from xray_runtime.engines.trainers.deepspeed.mesh import Mesh
from xray_runtime.engines.trainers.deepspeed.zero import ZeroEngine
from xray_runtime.models.head_layers import BorrowedHead
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import prompts_of, sequences
from xray_runtime.models.parts import check_parts


def check_stages(module: HeadedLM, stages: int, field: str) -> None:
    """Raises ValueError if the model cannot be split into so many stages, as `field` requires."""
    refused = f"{field}.pipeline_parallel: {stages} is not allowed"
    if not module.parts.fit(module.lm):
        raise ValueError(
            f"{refused}: only Llama-like models can be split into stages, not a {type(module.lm).__name__}"
        )
    check_parts(module.lm, f"{field}.pipeline_parallel: {stages}")
    if module.has_trunk:
        raise ValueError(f"{refused} with base.trainable_layers: a frozen trunk is computed once, not in a pipeline")
    if len(module.layers) < stages:
        raise ValueError(f"{refused}: the model has {len(module.layers)} layers")
    check_adapted_stages(module, stages, field)


class StageScorer(Scorer):
    """One pipeline stage of a frozen model."""

    def __init__(self, module: Any, mesh: Mesh) -> None:
        super().__init__(module)
        self._mesh = mesh
        parameter = next(self.module.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._hidden: int = self.module.lm.config.hidden_size
        self._sends: deque[tuple[Any, Tensor]] = deque()

    def evaluate(self, task: Callable[..., Any], batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        for batch in batches:
            states = self._receive_states(batch)
            if self._mesh.is_last:
                yield batch, self.forward(task, self._with_states(batch, states))
            else:
                self._send_up(self._stage_output(batch, states))
        self._wait_for_sends()

    def _with_states(self, batch: MicroBatch, states: Tensor | None) -> TextBatch[Tensor]:
        assert states is not None
        return batch.tensors.with_columns(trunk=sequences(batch.tensors).input_ids.like(states))

    def _stage_output(self, batch: MicroBatch, states: Tensor | None) -> Tensor:
        ids, prompts = sequences(batch.tensors).input_ids, prompts_of(batch.tensors)
        entering = {"input_ids": ids.values} if states is None else {"inputs_embeds": states}
        out: Tensor = self.forward(lambda module: module.stage_states(ids.lengths, prompts, **entering))
        return out

    def _receive_states(self, batch: MicroBatch) -> Tensor | None:
        if self._mesh.is_first:
            return None
        count = batch.tensors.num_tokens()
        states = torch.empty((count, self._hidden), dtype=self._dtype, device=self._device)
        dist.recv(states, self._mesh.at_stage(self._mesh.stage - 1), group=self._mesh.up_group)
        return states

    def _send_up(self, states: Tensor) -> None:
        self._send(states, self._mesh.stage + 1, self._mesh.up_group)

    def _send(self, tensor: Tensor, stage: int, group: Any) -> None:
        # Without waiting, or two stages could wait for each other. The tensor is kept until it was sent.
        tensor = tensor.contiguous()
        self._sends.append((dist.isend(tensor, self._mesh.at_stage(stage), group=group), tensor))
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()

    def _wait_for_sends(self) -> None:
        while self._sends:
            self._sends.popleft()[0].wait()


class PipelineEngine(StageScorer):
    """One pipeline stage of a trained model, around the engine that holds its layers."""

    def __init__(self, inner: ZeroEngine, mesh: Mesh) -> None:
        super().__init__(inner.module, mesh)
        self._inner, self.turn = inner, inner.turn
        self.weights, self.save = inner.weights, inner.save

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        return self._inner.forward(task, *args)

    def step(self, loss: Callable[[MicroBatch], Tensor], batches: Iterable[MicroBatch], lr: float) -> float:
        """See `Engine.step`. A stage is ahead of its backward passes by one micro-batch for each later stage."""
        ahead = self._mesh.topology.pipeline - 1 - self._mesh.stage
        in_flight: deque[tuple[Tensor | None, Tensor]] = deque()
        for batch in batches:
            in_flight.append(self._up(loss, batch))
            if len(in_flight) > ahead:
                self._down(*in_flight.popleft())
        while in_flight:
            self._down(*in_flight.popleft())
        self._send_head_gradient()
        norm = self._inner.apply(lr)
        self._send_head()
        self._wait_for_sends()
        return norm

    def close(self) -> None:
        self._inner.close()

    def load(self, directory: Path) -> None:
        self._inner.load(directory)
        self._send_head()
        self._wait_for_sends()

    def _up(self, loss: Callable[[MicroBatch], Tensor], batch: MicroBatch) -> tuple[Tensor | None, Tensor]:
        """A micro-batch's forward pass; returns (incoming states, outgoing states or loss)."""
        states = self._receive_states(batch)
        if states is not None:
            states.requires_grad_()
        if self._mesh.is_last:
            return states, loss(MicroBatch(batch.number, batch.rows, self._with_states(batch, states)))
        out = self._stage_output(batch, states)
        self._send_up(out.detach())
        return states, out

    def _down(self, states: Tensor | None, out: Tensor) -> None:
        if self._mesh.is_last:
            self._inner.backward(out * self._inner.num_copies)
        else:
            gradient = torch.empty_like(out)
            dist.recv(gradient, self._mesh.at_stage(self._mesh.stage + 1), group=self._mesh.down_group)
            self._inner.backward((out * gradient).sum())
        if states is not None:
            assert states.grad is not None
            self._send(states.grad, self._mesh.stage - 1, self._mesh.down_group)

    def _tied(self) -> bool:
        # Beside adapters the embedding is frozen, and so are its copies.
        return bool(self.module.lm.config.tie_word_embeddings) and self.module.adapters is None

    def _send_head(self) -> None:
        if self._tied() and self._mesh.is_first:
            # The copy is float32, whatever the precision.
            self._send(self._embedding().detach().float(), self._mesh.topology.pipeline - 1, self._mesh.up_group)
        elif self._tied() and self._mesh.is_last:
            dist.recv(self._head_copy().weight.data, self._mesh.at_stage(0), group=self._mesh.up_group)

    def _send_head_gradient(self) -> None:
        if self._tied() and self._mesh.is_last:
            weight = self._head_copy().weight
            # A value loss alone does not touch the head.
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = None
            self._send(gradient, 0, self._mesh.down_group)
        elif self._tied() and self._mesh.is_first:
            gradient = torch.empty_like(self._embedding(), dtype=torch.float32)
            dist.recv(gradient, self._mesh.at_stage(self._mesh.topology.pipeline - 1), group=self._mesh.down_group)
            name = f"lm.{self.module.parts.embeddings}.weight"
            self._inner.backward(self.forward(lambda module: (module.get_parameter(name) * gradient).sum()))

    def _embedding(self) -> Tensor:
        weight: Tensor = self.module.lm.get_submodule(self.module.parts.embeddings).weight
        return weight

    def _head_copy(self) -> BorrowedHead:
        head: BorrowedHead = self.module.lm.get_submodule(self.module.parts.head)
        return head
