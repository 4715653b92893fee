"""A model under DeepSpeed, sharded for this rank by its layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from xray_runtime.engines.engine import Engine, Scorer
from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.engines.shard_loading import Weights, load_shard
from xray_runtime.engines.topology import Topology
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.engines.trainers.deepspeed.mesh import Mesh
from xray_runtime.engines.trainers.deepspeed.pipeline import PipelineEngine, StageScorer, check_stages
from xray_runtime.engines.trainers.deepspeed.setup import check_offload, join_group
from xray_runtime.engines.trainers.deepspeed.tensor import check_split, split_layers
from xray_runtime.engines.trainers.deepspeed.zero import ZeroEngine, ZeroScorer
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.models.causal_lm import skeleton
from xray_runtime.models.family import family_of
from xray_runtime.models.heads import HeadedLM


def engine(module: HeadedLM, training: TrainingConfig, checkpoint: Path, device: torch.device) -> Engine:
    """See `Trainer.engine`."""
    layout = training.engine
    assert isinstance(layout, DeepSpeedConfig)
    check_offload(layout)
    if layout.activation_checkpointing:
        module.checkpoint_activations()
    mesh, weights = _shard(module, Topology.of(layout), checkpoint, device, "engine")
    inner = ZeroEngine(module, training, layout, weights, device, mesh)
    return inner if mesh is None or mesh.topology.pipeline == 1 else PipelineEngine(inner, mesh)


def scorer(module: HeadedLM, layout: FrozenConfig, checkpoint: Path, device: torch.device) -> Scorer:
    """See `Trainer.scorer`."""
    mesh, weights = _shard(module, Topology.of(layout), checkpoint, device, "frozen")
    dtype = getattr(torch, layout.precision)
    if mesh is None:
        return ZeroScorer(module, weights, device, dtype)
    load_shard(module, weights, device, dtype, frozen=True)
    return Scorer(module) if mesh.topology.pipeline == 1 else StageScorer(module, mesh)


def _shard(
    module: HeadedLM, topology: Topology, checkpoint: Path, device: torch.device, field: str
) -> tuple[Mesh | None, Weights]:
    """Reduce `module` to this rank's part, without loading weights, and join DeepSpeed's group.

    Returns the mesh (None: every rank has a whole replica) and the weights to load.
    """
    if not topology.is_split:
        join_group(device.type)
        return None, Weights(module, checkpoint)
    if field == "engine" and module.auxiliary is not None:
        raise ValueError(
            f"{field}: tensor_parallel and pipeline_parallel must be 1 for a model with an auxiliary loss of its own; "
            f"set {module.auxiliary.option} to false in its config.json to train it without"
        )
    # Checked before any group is made, so that all ranks fail alike.
    if topology.pipeline > 1:
        check_stages(module, topology.pipeline, field)
    if topology.tensor > 1:
        check_split(module.lm, topology.tensor, field)
    join_group(device.type)
    mesh = Mesh(topology)
    splits = split_layers(module, mesh, device) if topology.tensor > 1 else {}
    if topology.pipeline > 1:
        module.keep_stage(topology.layers(mesh.stage, len(module.layers)))
    return mesh, Weights(module, checkpoint, splits, mesh.tensor_rank)


def can_split(model: str) -> tuple[bool, bool]:
    """See `Trainer.can_split`."""
    module = HeadedLM(skeleton(model))
    if family_of(module.lm.config.model_type).pictures is not None:
        return False, False

    def accepted(check: Callable[[], None]) -> bool:
        try:
            check()
        except ValueError:
            return False
        return True

    return accepted(lambda: check_split(module.lm, 1, "engine")), accepted(lambda: check_stages(module, 1, "engine"))
