"""All steps, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu_acceptance import (
    generation_steps,
    machine_steps,
    pass_steps,
    peer_steps,
    product_steps,
    rank_steps,
    training_steps,
)
from benchmarks.gpu_acceptance.setting import Setting
from xray_runtime.models.lora import LoRAConfig


@dataclass(frozen=True)
class AcceptanceStep:
    """One thing that must work."""

    name: str
    run: Callable[[Setting], dict[str, Any]]
    """Returns its figures; raises if it does not work."""
    limit_s: float = 60.0
    modules: tuple[str, ...] = ()
    """Optional libraries that it needs."""
    num_gpus: int = 0
    """GPUs without which it cannot even be rehearsed."""
    num_ranks: int = 1
    """GPUs that it needs where there are GPUs."""

    def skip_reason(self, setting: Setting) -> str | None:
        """Why it cannot run here; None if it can."""
        for module in self.modules:
            # A submodule's parent may be missing too, for which `find_spec` would fail.
            parents = module.split(".")
            if any(find_spec(".".join(parents[: n + 1])) is None for n in range(len(parents))):
                return f"no {module}"
        count = torch.cuda.device_count()
        needed = max(self.num_gpus, self.num_ranks if setting.device == "cuda" else 0)
        return f"{count} GPUs of {needed}" if count < needed else None


def _train(name: str, **engine: Any) -> AcceptanceStep:
    return AcceptanceStep(name, partial(training_steps.train, **engine), modules=(DEEPSPEED,))


def _ranks(name: str, *modules: str, **engine: Any) -> AcceptanceStep:
    ranks, modules = rank_steps.NUM_RANKS, (DEEPSPEED, *modules)
    return AcceptanceStep(name, partial(rank_steps.train_ranks, **engine), 90.0, modules, num_ranks=ranks)


DEEPSPEED, VLLM, MEGATRON, RAY = "deepspeed", "vllm", "megatron.core", "ray"
ACTORS = DEEPSPEED, VLLM, RAY
_lora_by_ipc = partial(generation_steps.sync_direct, transport="ipc", lora=LoRAConfig())
STEPS = (
    AcceptanceStep("versions", machine_steps.versions),
    AcceptanceStep("attention", machine_steps.attention),
    AcceptanceStep("prepare", training_steps.prepare, 120.0),
    _train("ZeRO-1 bfloat16", zero_stage=1, precision="bfloat16"),
    AcceptanceStep("profile", pass_steps.profile, 90.0, (DEEPSPEED,)),
    AcceptanceStep("shared prompts", pass_steps.shared_prompts, 90.0, (DEEPSPEED,)),
    _train("ZeRO-0 float32", zero_stage=0),
    _train("ZeRO-2 bfloat16", zero_stage=2, precision="bfloat16"),
    _train("ZeRO-3 bfloat16", zero_stage=3, precision="bfloat16"),
    _train("ZeRO-3 float32", zero_stage=3),
    _train("recomputation", zero_stage=2, precision="bfloat16", activation_checkpointing=True),
    _train("offload", zero_stage=2, precision="bfloat16", offload="cpu"),
    AcceptanceStep("LoRA", training_steps.lora, modules=(DEEPSPEED,)),
    AcceptanceStep("Megatron", partial(training_steps.train, library="megatron"), modules=(MEGATRON,)),
    AcceptanceStep("snapshots", training_steps.snapshots, 90.0, (DEEPSPEED,)),
    AcceptanceStep("determinism", training_steps.determinism, 90.0, (DEEPSPEED,)),
    AcceptanceStep("trainer sleep", training_steps.trainer_sleep, modules=(DEEPSPEED, VLLM), num_gpus=1),
    AcceptanceStep("transformers", partial(generation_steps.sample, engine="transformers"), 90.0),
    AcceptanceStep("vLLM", partial(generation_steps.sample, engine="vllm"), 120.0, (VLLM,)),
    AcceptanceStep("vLLM sleep", generation_steps.generator_sleep, 120.0, (VLLM,), num_gpus=1),
    AcceptanceStep("vLLM beside a neighbour", generation_steps.neighbour, 120.0, (VLLM,), num_gpus=1),
    AcceptanceStep("sync by memory", generation_steps.sync_memory, 120.0, (DEEPSPEED, VLLM)),
    AcceptanceStep("sync of LoRA", partial(generation_steps.sync_memory, lora=LoRAConfig()), 120.0, (DEEPSPEED, VLLM)),
    AcceptanceStep("sync by IPC", partial(generation_steps.sync_direct, transport="ipc"), 180.0, ACTORS, num_gpus=1),
    AcceptanceStep("sync of LoRA by IPC", _lora_by_ipc, 180.0, ACTORS, num_gpus=1),
    AcceptanceStep("sync of a large embedding", generation_steps.sync_wide, 240.0, ACTORS, num_gpus=1),
    AcceptanceStep("in turn", product_steps.in_turn, 240.0, ACTORS, num_gpus=1),
    AcceptanceStep("xray run", product_steps.run, 300.0, (*ACTORS, "prefect", "mlflow")),
    AcceptanceStep("SFT beside TRL", peer_steps.sft, 120.0, ("trl",)),
    AcceptanceStep("GRPO beside TRL", peer_steps.grpo, 120.0, ("trl",)),
    _ranks("2 ranks, ZeRO-3", zero_stage=3, precision="bfloat16"),
    _ranks("2 ranks, tensor parallel", tensor_parallel=2),
    _ranks("2 ranks, pipeline", pipeline_parallel=2),
    _ranks("2 ranks, Megatron", MEGATRON, library="megatron", tensor_parallel=2),
    AcceptanceStep("2 ranks, vLLM", rank_steps.sample_ranks, 180.0, ACTORS, num_ranks=2),
    AcceptanceStep("sync by NCCL", partial(generation_steps.sync_direct, transport="nccl"), 180.0, ACTORS, num_gpus=2),
)
