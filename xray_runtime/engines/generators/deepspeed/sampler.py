"""Generation by DeepSpeed Inference: transformers' `generate` over a model that DeepSpeed has split (AutoTP).

Tensor parallel by any degree that divides the attention heads, with NCCL on CUDA and gloo on CPU. DeepSpeed's fused
kernels are not used, since they exist for few model families and not on CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from xray_runtime.engines.generators.transformers.sampler import prepared, sample
from xray_runtime.engines.process_group import join
from xray_runtime.engines.sampling import EngineRank, Reply, Sampler, Sampling
from xray_runtime.engines.sync.versioned import Tensors
from xray_runtime.engines.trainers.deepspeed.setup import join_group, load_deepspeed
from xray_runtime.models.causal_lm import load_model

OUTPUT_LAYER = "lm_head.weight"


class DeepSpeedSampler(Sampler):
    """This rank's shard of one model under DeepSpeed Inference."""

    def __init__(self, directory: Path, max_length: int, rank: EngineRank) -> None:
        deepspeed = load_deepspeed(rank.device)
        if rank.world_size > 1:
            join(rank.rank, rank.world_size, rank.host, rank.port, torch.device(rank.device))
            join_group(rank.device)
        lm: Any = prepared(load_model(directory))
        self._tied = bool(lm.config.tie_word_embeddings)
        self._engine = deepspeed.init_inference(
            lm,
            tensor_parallel={"tp_size": rank.world_size},
            dtype=torch.float32,
            replace_with_kernel_inject=False,
            max_out_tokens=max_length,
        )
        self._lm: Any = self._engine.module.eval()
        self._device = torch.device(rank.device)

    def sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        return sample(self._engine.generate, self._device, prompts, seeds, sampling)

    def write(self, tensors: Tensors, version: int) -> None:
        with torch.no_grad():
            for name, tensor in tensors:
                self._write(name, tensor)
                if self._tied and self._lm.get_parameter(name) is self._lm.get_input_embeddings().weight:
                    # Splitting the output layer untied it.
                    self._write(OUTPUT_LAYER, tensor)

    def _write(self, name: str, whole: torch.Tensor) -> None:
        parameter = self._lm.get_parameter(name)
        shard = torch.nn.Parameter(whole.to(parameter.device), requires_grad=False)
        if shard.shape != parameter.shape:
            # The layer takes this rank's part, as when DeepSpeed replaced the original layer.
            self._lm.get_submodule(name.rpartition(".")[0])._tp_partition([shard])
        parameter.copy_(shard)
