"""Plans of mixtures of experts: published sizes, what autograd keeps, what torch counts, and experts a batch reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.models.families import model
from xray_runtime.models.built_shapes import shape_of
from xray_runtime.models.causal_lm import fresh_llama
from xray_runtime.models.config import FreshBase, PretrainedBase
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.models.shapes import Experts, ModelShape, from_fresh
from xray_runtime.ops.planner.cost import forward_flops
from xray_runtime.ops.planner.memory import (
    Layout,
    Options,
    activation_bytes,
    generation_memory,
    kv_cache_bytes,
    training_memory,
)
from xray_runtime.ops.planner.model_states import sharding_of
from xray_runtime.ops.planner.splits import trained_layouts
from xray_runtime.ops.planner.workload import PlannedRole, Workload

SMALL = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("name", "parameters", "active", "experts"),
    [
        # Model card: "30.5B in total and 3.3B activated", 128 experts, 8 activated; 2,048 · 768 · 3 · 128 · 48.
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624, 3_353_032_704, 28_991_029_248),
        # Jiang et al. 2024: "47B parameters, but only uses 13B active"; 4,096 · 14,336 · 3 · 8 · 32.
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, 12_879_925_248, 45_097_156_608),
        # DeepSeek-AI 2024: "671B total parameters with 37B activated", without the layer that predicts a second token
        # and without 58 · 256 biases of the routers, which are no parameters; 7,168 · 2,048 · 3 · 256 · 58.
        ("deepseek-ai/DeepSeek-V3", 671_026_419_200 - 58 * 256, 37_552_282_624, 653_908_770_816),
        # OpenAI 2025, table 1: 116.83B, 5.13B active without embeddings (0.58B);
        # (2,880 · 2,880 · 3 + 3 · 2,880) · 128 · 36, with biases.
        ("openai/gpt-oss-120b", 116_829_156_672, 5_711_982_912, 114_701_598_720),
    ],
)
def test_published_mixtures_are_counted(name: str, parameters: int, active: int, experts: int) -> None:
    shape = from_pretrained(PretrainedBase(model=name))
    assert shape.experts is not None
    assert (shape.num_parameters, shape.active_parameters, shape.experts.parameters) == (parameters, active, experts)
    assert training_memory(shape, 2, Layout(), tokens=1, positions=0).weights == 2 * parameters


def test_latent_attention_caches_its_latents() -> None:
    shape = from_pretrained(PretrainedBase(model="deepseek-ai/DeepSeek-V3"))
    # 61 layers · (512 latent + 64 rotary features) · 2 bytes.
    assert kv_cache_bytes(shape, 10, 2) == kv_cache_bytes(shape, 10, 2, tp=8) == 10 * 61 * 576 * 2


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "granitemoe", "olmoe", "qwen2_moe", "glm4_moe", "gpt_oss"])
def test_experts_of_other_families(kind: str) -> None:
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=64, **SMALL
    )
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of(lm)
    width = 24 if kind in ("ernie4_5_moe", "qwen2_moe", "glm4_moe") else 48
    layers = 2 if kind in ("ernie4_5_moe", "glm4_moe") else 3  # the first is dense
    biases = 3 * width - width + 32 if kind == "gpt_oss" else 0
    assert shape.experts == Experts(
        number=8, chosen=2, width=width, num_layers=layers, parameters=layers * 8 * (3 * 32 * width + biases)
    )
    assert shape.num_parameters == sum(p.numel() for p in lm.parameters())


def small(kind: str) -> tuple[Any, ModelShape]:
    lm = model(kind, **SMALL, hidden_size=64, intermediate_size=96, vocab_size=100)
    lm.set_experts_implementation("grouped_mm")
    return lm.float(), shape_of(lm)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_activations_are_what_autograd_saves(kind: str) -> None:
    lm, shape = small(kind)
    module = HeadedLM(lm)
    rows, length = 3, 40
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module.hidden(torch.randint(0, 100, (rows * length,)), torch.full((rows,), length))
    for parameter in module.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert measured == pytest.approx(activation_bytes(shape, rows * length, 4, Layout()), rel=0.15)


def test_flops_are_those_that_torch_counts() -> None:
    lm, shape = small("mixtral")
    lm.set_experts_implementation("eager")
    role = PlannedRole(name="policy", shape=shape, use="trained", weight_bytes=4)
    length = 30
    workload = Workload(
        roles=(role,),
        sequence_tokens=length,
        response_tokens=length,
        batch_size=1,
        rollout_size=1,
        micro_batch_tokens=64,
    )
    with FlopCounterMode(display=False) as counter:
        lm(input_ids=torch.randint(0, 100, (1, length)), use_cache=False)
    # Torch counts the scores that causality drops, which we do not; they are few here.
    assert counter.get_total_flops() == pytest.approx(forward_flops(role, workload), rel=0.1)


def test_a_batch_reads_the_experts_it_takes() -> None:
    experts = Experts(number=8, chosen=2, width=4, num_layers=1, parameters=8)
    assert experts.taken(1) == 0.25
    # Two tokens miss an expert with probability (6/8)².
    assert experts.taken(2) == pytest.approx(1 - 0.5625)
    assert experts.taken(1000) == pytest.approx(1.0)


def test_a_layers_experts_are_the_largest_tensor_that_is_loaded() -> None:
    shape = from_pretrained(PretrainedBase(model="Qwen/Qwen3-30B-A3B"))
    memory = generation_memory(shape, 2, Layout(), sequences=1, cached_tokens=1)
    # 128 experts' gates and up projections, read in float32 before they are rounded.
    assert memory.loading == 4 * 128 * 2 * 768 * 2048


def test_our_own_mixture_is_counted_as_it_is_built(tiny_tokenizer: Any) -> None:
    sizes = FreshBase(hidden_size=64, num_layers=3, num_heads=2, num_kv_heads=1, intermediate_size=48, num_experts=4)
    lm: Any = fresh_llama(sizes, tiny_tokenizer, seed=1)
    shape = from_fresh(sizes.model_copy(update={"vocab_size": len(tiny_tokenizer)}))
    assert shape.num_parameters == sum(p.numel() for p in lm.parameters())
    built = shape_of(lm)
    assert (shape.experts, shape.active_parameters) == (built.experts, built.active_parameters)


def test_ranks_that_share_experts_gather_less() -> None:
    shape = from_pretrained(PretrainedBase(model="Qwen/Qwen3-30B-A3B"))
    options = Options(sharding=sharding_of("fsdp2"))
    whole, shared = (
        training_memory(shape, 2, Layout(zero_stage=3, dp=8, ep=ep), tokens=1, positions=1, options=options)
        for ep in (1, 8)
    )
    # ZeRO-3 gathers two layers of 128 · 3 · 2,048 · 768 elements of 2 bytes; now 7/8 of them stay on other ranks.
    assert whole.buffers - shared.buffers == 2 * 2 * 128 * 3 * 2048 * 768 * 7 // 8
    assert (whole.weights, whole.optimizer) == (shared.weights, shared.optimizer)


def test_only_trainers_and_numbers_of_experts_that_can_be_shared_are() -> None:
    shape = from_pretrained(PretrainedBase(model="mistralai/Mixtral-8x7B-v0.1"))

    def degrees(library: str, experts: Experts | None) -> set[int]:
        role = PlannedRole(
            name="policy", shape=replace(shape, experts=experts), use="trained", weight_bytes=2, library=library
        )
        role = replace(role, options=Options(sharding=sharding_of(library)))
        workload = Workload(
            roles=(role,),
            sequence_tokens=64,
            response_tokens=32,
            batch_size=8,
            rollout_size=8,
            micro_batch_tokens=64,
        )
        return {layout.ep for layout in trained_layouts(workload, 1, 1, 8)}

    assert shape.experts is not None
    assert degrees("fsdp2", shape.experts) == {1, 2, 4, 8}
    assert degrees("fsdp2", replace(shape.experts, number=60)) == {1, 2, 4}
    assert degrees("fsdp2", None) == degrees("deepspeed", shape.experts) == {1}
