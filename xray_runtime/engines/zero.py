"""Training engine: DeepSpeed ZeRO 0 to 3 over data-parallel ranks.

The caller owns normalization: micro-batch losses arrive already divided by *global* counts and are simply summed over
micro-batches and ranks, so a step does not depend on how a batch was split. DeepSpeed averages gradients over ranks;
the engine multiplies that back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xray_runtime.config import TrainingConfig

TAG = "engine"
"""Name of the one checkpoint DeepSpeed finds in a snapshot's directory."""
REDUCE_BUCKET = 500_000_000
"""Most gradient elements that are reduced at a time."""


class ZeroEngine:
    """One rank of a model under DeepSpeed ZeRO.

    Args:
        module: the whole module; ZeRO-3 partitions it here.
        training: optimizer settings and ZeRO stage. `training.lr` is a placeholder: each step brings its own.
        device: where this rank computes.
    """

    def __init__(self, module: nn.Module, training: TrainingConfig, device: torch.device) -> None:
        import deepspeed

        self.stage = training.engine.zero_stage
        self.device = device
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            _decay_groups(module, training.weight_decay), lr=training.lr, betas=training.betas, foreach=True
        )
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": False,
                # DeepSpeed allocates the whole bucket: 2 GB for its default of 5e8 elements, however small the model.
                "reduce_bucket_size": min(REDUCE_BUCKET, sum(p.numel() for p in trainable)),
            },
            "zero_allow_untested_optimizer": True,
            # ZeRO 0 clips in our hook below, which also tells the norm; DeepSpeed's own clipping there does not.
            "gradient_clipping": training.grad_clip if self.stage else 0.0,
            "steps_per_print": 2**31,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.module: Any = self.engine.module
        self.world_size = torch.distributed.get_world_size()
        self._norm = 0.0
        if not self.stage:

            def clip(*_: Any) -> None:
                self._norm = float(torch.nn.utils.clip_grad_norm_(trainable, training.grad_clip))

            optimizer.register_step_pre_hook(clip)

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        """Run `task(module, *args)` inside the engine's forward, where sharded parameters are gathered."""
        return self.engine(task, *args)

    def step(self, losses: Iterator[Tensor], lr: float) -> float:
        """One optimizer step at learning rate `lr` over this rank's micro-batch losses.

        Every rank must bring the same number of losses (collectives run in each). Returns the global gradient norm
        before clipping.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for loss in losses:
            self.engine.backward(loss * self.world_size)
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if self.stage else self._norm
        return float(norm if norm is not None else 0.0)

    def save(self, directory: Path) -> None:
        """Write everything this rank needs to go on exactly from here: trained parameters and optimizer state."""
        self.engine.save_checkpoint(str(directory), tag=TAG, save_latest=False, exclude_frozen_parameters=True)

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote under the same layout. The caller vouches for the files (they are pickles)."""
        self.engine.load_checkpoint(str(directory), tag=TAG, load_module_strict=False)

    @contextlib.contextmanager
    def gathered(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Whole parameters on every rank while the context lasts (ZeRO-3 gathers them; else a no-op)."""
        if self.stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            yield


def _decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    # Norms and biases are not decayed, as is usual for transformers.
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def init_collectives(rank: int, world_size: int, address: str, port: int, device: torch.device) -> None:
    """Join the process group of one model: NCCL on CUDA, gloo on CPU."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR=address, MASTER_PORT=str(port)
    )
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # An op that training never calls. Its build lock outlives a rank killed while it loads it, and every Workhorse
    # on that machine would wait for it for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)
