"""Training engine: FSDP2 over data-parallel ranks.

The caller normalizes, as under `deepspeed.zero`: losses and gradients are sums over micro-batches and ranks. Optimizers
step this rank's rows as plain tensors that share the memory of the sharded parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from xray_runtime.engines import states
from xray_runtime.engines.adamw import MOMENTS, clip_gradients, decay_groups
from xray_runtime.engines.engine import MicroBatch, Scorer, whole_weights
from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.engines.shard_loading import Weights
from xray_runtime.engines.trainers.fsdp2.config import FSDP2Config
from xray_runtime.engines.trainers.fsdp2.expert_parallel import ExpertParallel
from xray_runtime.engines.trainers.fsdp2.muon import MOMENTUM, Muon
from xray_runtime.engines.trainers.fsdp2.sharding import (
    own_rows,
    release_gathered,
    rows_of,
    shard,
    sharded_parameters,
)
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.store.shards import Piece
from xray_runtime.models.family import family_of
from xray_runtime.models.heads import HeadedLM


class FSDP2Scorer(Scorer):
    """One rank of a sharded model."""

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        # FSDP looks for tensors in all that goes in and out, and would trip over columns that a batch does not have.
        results: list[Any] = []

        def tensors(module: HeadedLM) -> list[Tensor]:
            results.append(task(module, *args))
            return [leaf for leaf in tree_leaves(results[0]) if isinstance(leaf, Tensor)]

        self.module(tensors)
        return results[0]


def scorer(module: HeadedLM, layout: FrozenConfig, checkpoint: Path, device: torch.device) -> Scorer:
    """See `Trainer.scorer`."""
    module.requires_grad_(False)
    shard(module, Weights(module, checkpoint), device, getattr(torch, layout.precision), regather=True)
    return FSDP2Scorer(module)


class FSDP2Engine(FSDP2Scorer):
    """One rank of a model under FSDP2.

    Args:
        module: the model or its skeleton, which is sharded here.
        training: optimizer settings and layout. `training.lr` is a placeholder: each step has its own.
        checkpoint: source of a skeleton's weights.

    Raises:
        ValueError: Muon does not know which of the model's parameters to step.
    """

    turn: tuple[int, int]

    def __init__(self, module: HeadedLM, training: TrainingConfig, checkpoint: Path, device: torch.device) -> None:
        layout = training.engine
        assert isinstance(layout, FSDP2Config)
        names = _hidden_matrices(module) if layout.optimizer == "muon" else set()
        if layout.activation_checkpointing:
            module.checkpoint_activations()
        weights = Weights(module, checkpoint)
        degree = layout.expert_parallel
        self._experts = ExpertParallel(module, degree, device) if degree > 1 else None
        regather = layout.zero_stage == 3
        shard(module, weights, device, getattr(torch, layout.precision), regather=regather, experts=self._experts)
        super().__init__(module)
        self.turn, self._grad_clip = (dist.get_rank(), dist.get_world_size()), training.grad_clip
        self._shared = {states.hugging_face_name(name) for name in (self._experts.names if self._experts else ())}
        """Names of parameters of experts, of which each rank gathers its own alone."""
        self._parameters = {states.hugging_face_name(name): p for name, p in sharded_parameters(module)}
        self._rows = {name: nn.Parameter(own_rows(p)) for name, p in self._parameters.items()}
        """The tensors that the optimizers step."""
        of_parameter = {id(p): self._rows[name] for name, p in self._parameters.items() if name not in names}
        groups = decay_groups(module, training.weight_decay)
        for group in groups:
            rows = [of_parameter[id(p)] for p in group["params"] if id(p) in of_parameter]
            group["params"] = [part for part in rows if part.numel()]
        self.optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, fused=True)
        for part in (part for group in groups for part in group["params"]):
            # Adam's initial state, so that a snapshot can be loaded before the first step.
            self.optimizer.state[part] = {key: torch.zeros_like(part) for key in MOMENTS}
            self.optimizer.state[part]["step"] = torch.zeros((), device=device)
        self.muon: Muon | None = None
        if names:
            matrices = sorted(names)
            self.muon = Muon(
                [self._rows[name] for name in matrices],
                [self._parameters[name].shape[0] for name in matrices],
                training.lr,
                training.weight_decay,
                layout.muon_momentum,
            )
        self._num_steps = 0

    def step(self, loss: Callable[[MicroBatch], Tensor], batches: Iterable[MicroBatch], lr: float) -> float:
        for batch in batches:
            loss(batch).backward()
        return self.apply(lr)

    def apply(self, lr: float) -> float:
        """Clip the summed gradients and step; returns their global norm before clipping. If it is not finite, nothing
        changes."""
        rows = list(self._rows.values())
        for part, parameter in zip(rows, self._parameters.values(), strict=True):
            # Zeros, not None: parameters without a gradient still decay, as under DeepSpeed.
            assert parameter.grad is None or isinstance(parameter.grad, DTensor)
            part.grad = torch.zeros_like(part) if parameter.grad is None else own_rows(parameter.grad)
            parameter.grad = None
        square = torch.nn.utils.get_total_norm([part.grad for part in rows if part.grad is not None]).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        if finite := math.isfinite(norm):
            clip_gradients(rows, self._grad_clip, norm)
            for optimizer in (self.optimizer, self.muon):
                if optimizer is not None:
                    for group in optimizer.param_groups:
                        group["lr"] = lr
                    optimizer.step()
        for part in rows:
            part.grad = None
        self._num_steps += finite
        return float(norm)

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        release_gathered(self.module)
        return whole_weights(self.module, sharded_parameters(self.module), self._whole, merged=merged)

    def save(self, directory: Path) -> None:
        pieces = {(kind, name): self._piece(name) for name in self._rows for kind in self._kinds(name)}
        states.write(directory, dist.get_rank(), pieces, self._num_steps, self._held)

    def load(self, directory: Path) -> None:
        release_gathered(self.module)
        with states.Reader(directory) as saved, torch.no_grad():
            for name in self._rows:
                for kind in self._kinds(name):
                    self._held(kind, name).copy_(saved.read(kind, name, self._piece(name)))
            self._num_steps = saved.step
        for state in self.optimizer.state.values():
            state["step"].fill_(saved.step)

    def _kinds(self, name: str) -> tuple[str, ...]:
        is_muons = self.muon is not None and self._rows[name] in self.muon.state
        return (states.WEIGHT, MOMENTUM) if is_muons else (states.WEIGHT, *MOMENTS)

    def _whole(self, name: str, parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        whole: Tensor = parameter.full_tensor().detach()
        shared = self._experts is not None and states.hugging_face_name(name) in self._shared
        return self._experts.joined(whole) if self._experts is not None and shared else whole

    def _piece(self, name: str) -> Piece:
        return rows_of(self._parameters[name], self._experts if name in self._shared else None)

    def _held(self, kind: str, name: str) -> Tensor:
        """This rank's rows of a weight or of an optimizer's state, flattened."""
        part = self._rows[name]
        optimizer: torch.optim.Optimizer = self.muon if kind == MOMENTUM and self.muon else self.optimizer
        # Without rows there is no state.
        held: Tensor = part.data if kind == states.WEIGHT or not part.numel() else optimizer.state[part][kind]
        return held.view(-1)


def _hidden_matrices(module: HeadedLM) -> set[str]:
    """Hugging Face names of the trained parameters that Muon steps."""
    lm = module.lm
    family = family_of(lm.config.model_type)
    trained = [(states.hugging_face_name(name), p) for name, p in module.named_parameters() if p.requires_grad]
    if not (names := {name for name, p in trained if family.is_hidden_matrix(name, p.dim())}):
        raise ValueError(
            f"engine.optimizer: 'muon' is not allowed: a {type(lm).__name__} is not known to have matrices between "
            "hidden states"
        )
    return names
