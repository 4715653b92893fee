"""The protocol of a trainer, and how a model comes under the one that its layout names.

A trainer is a folder in `trainers`, or an entry point of the group `xray.trainers`. Its module is light: it declares
the config's fields and what the trainer can do, and imports its library in functions. At module level it imports
`engines.layouts`, `engines.capabilities` and this module, and nothing else of X-ray: configs are read after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from xray_runtime.engines.layouts import TRAINERS, ComputedConfig, FrozenConfig, TrainerPlug

if TYPE_CHECKING:
    import torch

    from xray_runtime.engines.engine import Engine, Scorer
    from xray_runtime.engines.training_config import TrainingConfig
    from xray_runtime.kernel.config.section import RuntimeConfig
    from xray_runtime.models.heads import HeadedLM


class Trainer(TrainerPlug, Protocol):
    """A library that trains models. Before `engine` or `scorer` is called, this process has joined its process group
    (`process_group.join`), and torch's `distributed` is all that it may take for granted."""

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        """Import slow libraries before a model is opened."""

    def engine(self, module: HeadedLM, training: TrainingConfig, checkpoint: Path, device: torch.device) -> Engine:
        """The engine of this rank, with its part of `module`.

        Args:
            module: the model or its skeleton, whose weights this rank reads as far as it needs them.
            training: `precision` is not `auto`.
            checkpoint: of the skeleton's weights.

        Raises:
            ValueError: the model cannot be sharded or trained so; the message names the field.
        """

    def scorer(self, module: HeadedLM, layout: FrozenConfig, checkpoint: Path, device: torch.device) -> Scorer:
        """This rank of a model that only scores and that is split or sharded, as `engine`. Called with
        `capabilities.scoring` alone."""
        raise AssertionError(f"{type(self).__name__} does not support this call")

    def can_split(self, model: str) -> tuple[bool, bool]:
        """Whether `model` (as in `PretrainedBase`) supports tensor and pipeline parallelism. Called with
        `capabilities.sharding` alone, as `planned`."""
        raise AssertionError(f"{type(self).__name__} does not support this call")

    def planned(self, level: int | None, *, offload: bool) -> Mapping[str, int | str | None]:
        """The fields of its config, beside those of every trainer, for a plan.

        Args:
            level: of sharding; None: not chosen yet.
            offload: optimizer states are in host memory.
        """
        raise AssertionError(f"{type(self).__name__} does not support this call")


def trainer(name: str) -> Trainer:
    """The trainer `name`. Raises ValueError: there is none."""
    return cast("Trainer", TRAINERS.get(name))


def build_engine(module: HeadedLM, training: TrainingConfig, checkpoint: Path, device: torch.device) -> Engine:
    """The engine of `training.engine`'s layout, with this rank's part of `module`; see `Trainer.engine`."""
    training = training.resolved(device.type)
    training.engine.check_written()
    training.engine.check_device(device.type, "engine")
    _share_sequences(module, training.engine, "engine")
    return trainer(training.engine.library).engine(module, training, checkpoint, device)


def build_scorer(module: HeadedLM, layout: FrozenConfig, checkpoint: Path, device: torch.device) -> Scorer:
    """This rank of a model that only scores: a whole replica, or what its trainer makes of a layout that is split or
    sharded. Raises ValueError: the model cannot be sharded so; the message names the field."""
    import torch

    from xray_runtime.engines.engine import Scorer
    from xray_runtime.engines.shard_loading import Weights, load_shard

    layout = layout.resolved(device.type)
    _share_sequences(module, layout, "frozen")
    if layout.is_split or (layout.zero_stage and layout.num_copies > 1):
        return trainer(layout.library).scorer(module, layout, checkpoint, device)
    load_shard(module, Weights(module, checkpoint), device, getattr(torch, layout.precision), frozen=True)
    return Scorer(module, threaded=device.type == "cpu" and layout.sequence_parallel == 1)


def _share_sequences(module: HeadedLM, layout: ComputedConfig, field: str) -> None:
    """Have the sequence-parallel ranks of `layout`, the field `field`, share the tokens of each row. Raises ValueError:
    the model does not allow it."""
    if (size := layout.sequence_parallel) == 1:
        return
    refused, heads = f"{field}.sequence_parallel: {size} is not allowed", module.lm.config.num_attention_heads
    if not module.packs:
        raise ValueError(f"{refused}: the sequences of a {type(module.lm).__name__} cannot be packed into one row")
    if heads % size:
        raise ValueError(f"{refused}: it must divide the model's {heads} heads")
    import torch.distributed as dist

    from xray_runtime.engines.process_group import TIMEOUT
    from xray_runtime.engines.topology import Topology
    from xray_runtime.models.sequence_parallel import SequenceRanks

    topology, rank = Topology.of(layout), dist.get_rank()
    # Every rank makes every group, as torch requires.
    groups = [
        dist.new_group([topology.rank(0, data, 0, sequence) for sequence in range(size)], timeout=TIMEOUT)
        for data in range(topology.data)
    ]
    module.sequence_ranks = SequenceRanks(groups[topology.data_rank(rank)], topology.sequence_rank(rank), size)
