"""Build the engine or scorer of a layout, with the model sharded for this rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.config.engines import FrozenConfig, TrainingConfig, with_precision
from xray_runtime.engines.engine import Engine, Scorer
from xray_runtime.engines.topology import Topology

if TYPE_CHECKING:
    from xray_runtime.engines.shard_loading import Weights
    from xray_runtime.engines.training.mesh import Mesh
    from xray_runtime.models.heads import HeadedLM


def build_engine(module: HeadedLM, training: TrainingConfig, checkpoint: Path, device: Any) -> Engine:
    """The engine of `training.engine`'s layout with this rank's part of `module`, which is sharded here.

    If its causal LM is a skeleton, only this rank's part is read from `checkpoint`. Raises ValueError: the model cannot
    be sharded or trained so; the message names the field.
    """
    from xray_runtime.engines.training.deepspeed_setup import check_offload
    from xray_runtime.engines.training.pipeline import PipelineEngine
    from xray_runtime.engines.training.zero import ZeroEngine

    training = with_precision(training, device.type)
    training.engine.check_zero_stage()
    check_offload(training.engine)
    if training.engine.library == "megatron":
        from xray_runtime.engines.training.megatron.engine import MegatronEngine

        return MegatronEngine(module, training, checkpoint, device)
    if training.engine.activation_checkpointing:
        module.checkpoint_activations()
    mesh, weights = _shard(module, Topology.of(training.engine), checkpoint, device, "engine")
    engine = ZeroEngine(module, training, weights, device, mesh)
    return engine if mesh is None or mesh.topology.pipeline == 1 else PipelineEngine(engine, mesh)


def build_scorer(module: HeadedLM, layout: FrozenConfig, checkpoint: Path, device: Any) -> Scorer:
    """This rank of a frozen model, sharded and read as in `build_engine`. Raises ValueError: the model cannot be
    sharded so; the message names the field."""
    import torch

    from xray_runtime.engines.shard_loading import load_shard
    from xray_runtime.engines.training.pipeline import StageScorer
    from xray_runtime.engines.training.zero import ZeroScorer

    topology = Topology.of(layout)
    mesh, weights = _shard(module, topology, checkpoint, device, "frozen")
    dtype = getattr(torch, with_precision(layout, device.type).precision)
    if layout.zero_stage and topology.data > 1:
        return ZeroScorer(module, weights, device, dtype)
    load_shard(module, weights, device, dtype, frozen=True)
    if mesh is None:
        return Scorer(module, threaded=device.type == "cpu")
    return Scorer(module) if topology.pipeline == 1 else StageScorer(module, mesh)


def _shard(
    module: HeadedLM, topology: Topology, checkpoint: Path, device: Any, field: str
) -> tuple[Mesh | None, Weights]:
    """Reduce `module` to this rank's part, without loading weights.

    Returns the mesh (None: every rank has a whole replica) and the weights to load.
    """
    from xray_runtime.engines.shard_loading import Weights
    from xray_runtime.engines.training.mesh import Mesh
    from xray_runtime.engines.training.pipeline import check_stages
    from xray_runtime.engines.training.tensor import check_split, split_layers

    if not topology.is_split:
        return None, Weights(module, checkpoint)
    # Checked before any group is made, so that all ranks fail alike.
    if field == "engine" and module.auxiliary is not None:
        raise ValueError(
            f"{field}: tensor_parallel and pipeline_parallel must be 1 for a model with an auxiliary loss of its own; "
            f"set {module.auxiliary.option} to false in its config.json to train it without"
        )
    if topology.pipeline > 1:
        check_stages(module, topology.pipeline, field)
    if topology.tensor > 1:
        check_split(module.lm, topology.tensor, field)
    mesh = Mesh(topology)
    splits = split_layers(module, mesh, device) if topology.tensor > 1 else {}
    if topology.pipeline > 1:
        module.keep_stage(topology.layers(mesh.stage, len(module.layers)))
    return mesh, Weights(module, checkpoint, splits, mesh.tensor_rank)


def can_shard(model: str) -> tuple[bool, bool]:
    """Whether `model` (as in `PretrainedBase`) supports tensor and pipeline parallelism."""
    from xray_runtime.engines.training.pipeline import check_stages
    from xray_runtime.engines.training.tensor import check_split
    from xray_runtime.models.causal_lm import skeleton
    from xray_runtime.models.heads import HeadedLM

    module = HeadedLM(skeleton(model))

    def accepted(check: Callable[[], None]) -> bool:
        try:
            check()
        except ValueError:
            return False
        return True

    return accepted(lambda: check_split(module.lm, 1, "engine")), accepted(lambda: check_stages(module, 1, "engine"))
