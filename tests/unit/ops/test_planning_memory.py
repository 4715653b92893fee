"""The memory model: published figures, hand arithmetic, what transformers builds and what autograd really holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.message_texts import Messages
from xray_runtime.algorithms import logprobs
from xray_runtime.data.batch import StepTotals
from xray_runtime.models.config import FreshBase, PretrainedBase
from xray_runtime.models.objectives import training_loss
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.models.shapes import (
    ModelShape,
    device_parameters,
    from_fresh,
    from_hf_config,
    from_parameter_count,
    lora_parameters,
)
from xray_runtime.ops.planner.memory import (
    MAX_LOGITS,
    MAX_LOGITS_ON_GPU,
    Layout,
    Memory,
    Options,
    activation_bytes,
    generation_memory,
    kv_cache_bytes,
    layer_activation_bytes,
    logit_bytes,
    scoring_memory,
    training_memory,
)
from xray_runtime.ops.planner.model_states import model_states, sharding_of
from xray_runtime.ops.planner.sync_memory import buffer_bytes, receiving_bytes, sending_bytes
from xray_runtime.ops.planner.workload import from_parameters

SHARDING = sharding_of("deepspeed")
SMALL = ModelShape(
    num_layers=2,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_size=32,
    intermediate_size=128,
    vocab_size=320,
    tied=True,
)

LLAMA_2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
LLAMA_3_8B = LLAMA_2_7B | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}


# --- model states


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_papers_figure_1(stage: int, gigabytes: float) -> None:
    """7.5 billion parameters, 64 devices, mixed-precision Adam (Rajbhandari et al. 2020)."""
    assert round(sum(model_states(7.5e9, 7.5e9, 2, stage, 64, SHARDING)) / 1e9, 1) == gigabytes


def test_states_of_a_float32_model() -> None:
    # 1,000 parameters: 4 bytes of weight, 4 of gradient, 8 of moments; ZeRO 1 to 3 add a master copy of 4.
    assert [sum(model_states(1000, 1000, 4, stage, 4, SHARDING)) for stage in range(4)] == [
        4000 + 4000 + 8000,
        4000 + 4000 + 12000 / 4,
        4000 + 4000 / 4 + 12000 / 4,
        (4000 + 4000 + 12000) / 4,
    ]


def test_lora_trains_its_adapters_alone() -> None:
    # A layer's projections, in + out: q 64+64, k and v 64+32, o 64+64, gate, up and down 64+128; rank 4, two layers.
    assert lora_parameters(SMALL, 4) == 4 * 2 * (128 + 2 * 96 + 128 + 3 * 192)
    adapters = lora_parameters(SMALL, 4)
    memory = training_memory(SMALL, 2, Layout(), tokens=8, positions=0, options=Options(lora_rank=4))
    assert memory.weights == 2 * (SMALL.num_parameters + adapters)
    assert memory.gradients == 2 * adapters
    assert memory.optimizer == 12 * adapters


def test_a_frozen_trunk_has_weights_only() -> None:
    trained = SMALL.layer_parameters() + 64  # the top layer and the final norm
    memory = training_memory(SMALL, 4, Layout(), tokens=8, positions=0, top_layers=1, branches=1)
    assert memory.weights == 4 * (SMALL.num_parameters + trained)
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)


def test_mixed_precision_sums_gradients_in_float32() -> None:
    # 1,000 parameters: 2 bytes of weight, 4 of master, 8 of moments; gradients 4 and, until ZeRO 2, a pass's 2.
    states = [sum(model_states(1000, 1000, 2, stage, 4, SHARDING, float32_sums=True)) for stage in (1, 2, 3)]
    assert states == [2000 + 6000 + 12000 / 4, 2000 + 4000 / 4 + 12000 / 4, (2000 + 4000 + 12000) / 4]
    # With adapters of 100 parameters only these are summed and stepped.
    assert model_states(1100, 100, 2, 1, 1, SHARDING, float32_sums=True) == (2200, 600, 1200)


def test_adapters_on_some_layers() -> None:
    # q: 64 + 64, v: 64 + 32; rank 4, two layers.
    assert lora_parameters(SMALL, 4, targets=("q_proj", "v_proj")) == 4 * 2 * (128 + 96)
    # Of names that are no Llama's the sizes are not known: as many as there can be.
    assert lora_parameters(SMALL, 4, targets=("query_key_value",)) == lora_parameters(SMALL, 4)


def test_offloaded_states_leave_the_device() -> None:
    def memory(stage: int) -> Memory:
        layout = Layout(zero_stage=stage, dp=2)
        return training_memory(SMALL, 2, layout, tokens=8, positions=0, options=Options(offload=True))

    assert (memory(2).weights, memory(2).optimizer) == (2 * SMALL.num_parameters, 0)
    # ZeRO-3 offloads weights too; what it computes with is gathered.
    assert (memory(3).weights, memory(3).optimizer) == (0, 0)
    assert memory(3).buffers == 2 * SMALL.num_parameters + 2 * SMALL.num_parameters
    alone = training_memory(SMALL, 2, Layout(zero_stage=3), tokens=8, positions=0, options=Options(offload=True))
    assert alone.buffers == memory(3).buffers


def test_memory_of_loading() -> None:
    # The largest tensor is the embedding, 320 × 64, read in float32.
    largest, n = 320 * 64, SMALL.num_parameters

    def frozen(width: int, **layout: int) -> int:
        return scoring_memory(SMALL, width, Layout(**layout), tokens=8, positions=8, sharding=SHARDING).loading

    def trained(width: int, **layout: int) -> int:
        return training_memory(SMALL, width, Layout(**layout), tokens=8, positions=8).loading

    # float32 is read into its place. What is rounded is there twice, and what is shared out once whole.
    assert (frozen(4), frozen(2)) == (0, 4 * largest)
    assert (frozen(4, zero_stage=3, dp=2), frozen(2, zero_stage=3, dp=2)) == (4 * largest, (4 + 2) * largest)
    assert trained(4) == 8 * n
    # DeepSpeed's flat copy of the weights, or a master and two moments; ZeRO-3 makes gradients and its bucket as well.
    assert (trained(4, zero_stage=1, dp=4), trained(4, zero_stage=1, dp=2)) == (4 * n, 12 * n // 2)
    assert trained(4, zero_stage=3, dp=2) == (4 + 12) * n // 2 + 4 * n + 4 * largest


def test_memory_of_loading_counts_in_the_peak() -> None:
    memory = Memory(weights=100, activations=30, process=5, loading=50)
    assert memory.total == 155
    assert replace(memory, logits=40).total == 175


def test_checkpointing_keeps_less() -> None:
    asked = training_memory(SMALL, 4, Layout(), tokens=8, positions=0, options=Options(checkpointing=True))
    assert asked.activations < training_memory(SMALL, 4, Layout(), tokens=8, positions=0).activations


# --- shapes


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"head_dim": 32, "attention_bias": True, "mlp_bias": True},
    ],
    ids=["plain", "tied, grouped", "odd heads, biases"],
)
def test_parameters_are_counted_as_transformers_builds_them(family: str, options: dict[str, Any]) -> None:
    import torch
    import transformers

    if family != "llama":
        options = {
            k: v for k, v in options.items() if not k.endswith("_bias") or (family, k) == ("qwen3", "attention_bias")
        }
    sizes = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.AutoConfig.for_model(family, **(sizes | options))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert from_hf_config(config.to_dict()).num_parameters == sum(p.numel() for p in model.parameters())


def test_our_own_llama_is_counted_as_transformers_builds_it() -> None:
    import torch
    import transformers

    fresh = from_fresh(FreshBase())
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=2048,
                hidden_size=160,
                num_hidden_layers=4,
                num_attention_heads=5,
                num_key_value_heads=5,
                intermediate_size=448,
                tie_word_embeddings=True,
            )
        )
    assert fresh.num_parameters == sum(p.numel() for p in model.parameters())


def test_the_header_of_a_gguf_file_is_read(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(3)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    names = {"token_embd.weight": 160 * 64, "blk.0.attn_q.weight": 100, "output_norm.weight": 64}
    for name, size in names.items():
        writer.add_tensor(name, np.zeros(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = from_pretrained(PretrainedBase(model=str(tmp_path / "model.gguf")))
    # Every number of the file is counted, whatever the layers are made of.
    assert shape.num_parameters == sum(names.values())
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_size) == (3, 4, 2, 16)
    assert (shape.vocab_size, shape.tied, shape.max_positions) == (160, True, None)


def test_a_directory_is_read_without_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert from_pretrained(PretrainedBase(model=str(tmp_path))).num_parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("file", "content"), [("config.json", "[1]"), ("config.json", "{"), ("other.txt", ""), ("model.gguf", "no GGUF")]
)
def test_unreadable_models_are_named_with_their_field(
    tmp_path: Path, file: str, content: str, message_texts: Messages
) -> None:
    (tmp_path / file).write_text(content)
    model = tmp_path / file if file.endswith(".gguf") else tmp_path
    with message_texts.raises(ValueError):
        from_pretrained(PretrainedBase(model=str(model)))


@given(st.floats(min_value=1e6, max_value=1e13))
def test_a_count_becomes_a_plausible_llama(count: float) -> None:
    shape = from_parameter_count(count)
    assert 0 <= int(count) - shape.num_parameters < shape.num_layers
    assert shape.num_heads * shape.head_size == shape.hidden_size
    assert shape.num_heads % shape.num_kv_heads == 0
    if count > 1e8:
        assert 50 < shape.hidden_size / shape.num_layers < 200
        assert 2.4 < shape.intermediate_size / shape.hidden_size < 3.2


# --- activations and KV cache


def test_a_layers_activations_by_hand() -> None:
    # One token, float32. Norms: 2 · (64 · (4 + 4 + 4) + 4) = 1,544. Attention: q and output, twice, 3 · 64, k and v
    # 2 · 32, of 4 bytes each, and 2 log-sums of 4: 1,032. MLP: 4 · 128 · 4 = 2,048.
    assert layer_activation_bytes(SMALL, 1, 4) == 1544 + 1032 + 2048
    assert layer_activation_bytes(SMALL, 10, 4) == 10 * (1544 + 1032 + 2048)
    # bfloat16: norms 2 · (64 · (4 + 2 + 2) + 4) = 1,032; attention 256 · 2 + 8 = 520; MLP 1,024.
    assert layer_activation_bytes(SMALL, 1, 2) == 1032 + 520 + 1024
    # Two tensor-parallel ranks: one head each, the one key-value head on both; 3 · 32 + 2 · 32, and one log-sum.
    assert layer_activation_bytes(SMALL, 1, 4, tp=2) == 1544 + (4 * 160 + 4) + 1024


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "width", "checkpointing"),
    [(1, "float32", 4, False), (4, "bfloat16", 2, False), (4, "float32", 4, True), (1, "bfloat16", 2, True)],
)
def test_activations_are_what_autograd_saves(kv_heads: int, dtype: str, width: int, checkpointing: bool) -> None:
    import torch
    import transformers

    from xray_runtime.models.heads import HeadedLM

    shape = replace(SMALL, num_layers=3, hidden_size=128, num_heads=4, num_kv_heads=kv_heads, intermediate_size=320)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        use_cache=False,
    )
    model = HeadedLM(transformers.LlamaForCausalLM(config)).to(getattr(torch, dtype))
    if checkpointing:
        model.checkpoint_activations()
    rows, length = 3, 40
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.hidden(torch.zeros(rows * length, dtype=torch.int64), torch.full((rows,), length))
    keep(out)
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    tables = rows * length * 8  # the token ids
    if not checkpointing:
        tables += 2 * rows * length * 32 * width  # cosines and sines of the positions, the same for all layers
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) - tables
    predicted = activation_bytes(shape, rows * length, width, Layout(), checkpointing=checkpointing)
    if checkpointing:
        # The forward pass keeps no layer's inside; the backward pass makes one at a time.
        predicted -= layer_activation_bytes(shape, rows * length, width)
    assert measured == pytest.approx(predicted, rel=1e-2)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize(("family", "heads_of"), [("gemma2", 4), ("gpt_oss", 4), ("llama", 0)])
def test_eager_attention_keeps_scores(family: str, heads_of: int, dtype: str, width: int) -> None:
    """Of four heads, two layers and three rows of 40 tokens: 8 bytes a score where caps are there too, else less."""
    import torch

    from tests.unit.models.families import model
    from xray_runtime.models.built_shapes import shape_of
    from xray_runtime.models.heads import HeadedLM

    options: dict[str, Any] = {} if family == "llama" else {"sliding_window": 64}
    options |= {"num_local_experts": 4} if family == "gpt_oss" else {}
    lm = model(family, max_position_embeddings=64, **options).to(getattr(torch, dtype))
    shape, rows, length = shape_of(lm), 3, 40
    assert shape.eager == (heads_of > 0)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() >= 3 and tensor.shape[-2] == length and tensor.shape[-1] in (length, length + 1):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        HeadedLM(lm).hidden(torch.zeros(rows * length, dtype=torch.int64), torch.full((rows,), length))
    tokens = rows * length
    scores = [activation_bytes(shape, tokens, width, Layout(), scored_length=n) for n in (length, 0)]
    expected = scores[0] - scores[1] if shape.eager else 0
    assert expected == 2 * heads_of * rows * length**2 * 8
    if family == "gpt_oss":  # no cap, and its softmax is in the weights' width, a sink wider
        assert 0 < sum(saved.values()) <= expected
    else:
        assert sum(saved.values()) == expected


def test_a_plan_counts_the_scores_of_eager_attention() -> None:
    plain = from_parameters(1e9, 1024)
    role = plain.of_use("trained")[0]
    eager = replace(role, shape=replace(role.shape, eager=True))
    tokens, _ = plain._pass(role, plain.micro_batch_tokens)
    more = plain.memory(eager, Layout()).activations - plain.memory(role, Layout()).activations
    assert more == role.shape.num_layers * role.shape.num_heads * tokens * 1024 * 8


@pytest.mark.parametrize(("layers", "vocabulary", "rows"), [(6, 512, 16), (2, 8000, 16)], ids=["deep", "wide logits"])
def test_a_training_pass_peaks_as_predicted(layers: int, vocabulary: int, rows: int) -> None:
    """Gradients, activations and logits of a real forward and backward pass, by torch's record of every allocation."""
    import torch
    import transformers

    from benchmarks.held import peak_bytes
    from xray_runtime.data.batch import TextBatch
    from xray_runtime.data.ragged import Ragged
    from xray_runtime.models.heads import HeadedLM
    from xray_runtime.models.objectives import SFTObjective

    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = HeadedLM(transformers.LlamaForCausalLM(config)).eval()
    ids = Ragged(torch.zeros(rows * 64, dtype=torch.int64), torch.arange(0, rows * 64 + 1, 64))
    batch = TextBatch(input_ids=ids, prompt_lengths=torch.full((rows,), 32))

    def step() -> None:
        loss, _ = training_loss(model, SFTObjective(), batch, StepTotals(tokens=1.0))
        loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    peak = peak_bytes(step)
    memory = training_memory(from_hf_config(config.to_dict()), 4, Layout(), tokens=rows * 64, positions=rows * 32)
    # Not all gradients exist yet when activations are at their most, so the sum is a little too much; never too little.
    assert peak <= memory.gradients + memory.activations + memory.logits <= 1.15 * peak


def test_kv_cache_by_hand() -> None:
    # Llama 2 7B in 16 bits: 2 · 32 layers · 32 heads · 128 · 2 bytes = 512 KiB a token; Llama 3 8B has 8 heads of them.
    assert kv_cache_bytes(from_hf_config(LLAMA_2_7B), 1, 2) == 512 * 1024
    eight = from_hf_config(LLAMA_3_8B)
    assert kv_cache_bytes(eight, 1000, 2) == 1000 * 128 * 1024
    assert kv_cache_bytes(eight, 1000, 2, tp=4, pp=2) == 1000 * 16 * 1024
    # More ranks than heads: each head is held twice.
    assert kv_cache_bytes(eight, 1, 2, tp=16) == kv_cache_bytes(eight, 1, 2, tp=8)


def test_the_fullest_pipeline_stage_counts() -> None:
    shape = replace(SMALL, num_layers=5)
    layer, embeddings = shape.layer_parameters(), 320 * 64
    assert device_parameters(shape, pp=2) == 3 * layer + embeddings + 64
    assert device_parameters(replace(shape, tied=False)) == 5 * layer + 2 * embeddings + 64
    # Two ranks: q and o halve, the one key-value head stays, the MLP halves; norms stay.
    assert shape.layer_parameters(tp=2) == 2 * 64 * 32 * 2 + 3 * 64 * 64 + 2 * 64


def test_logits_are_counted_by_the_chunk() -> None:
    assert MAX_LOGITS == logprobs.MAX_LOGITS
    assert getattr(logprobs, "MAX_LOGITS_ON_GPU", 2**28) == MAX_LOGITS_ON_GPU
    # Of 150,000 words 111 tokens have 2²⁴ logits, less a few: 200 MB with what is made of them, however many follow.
    shape = replace(SMALL, vocab_size=150_000)
    assert logit_bytes(shape, 100) == 3 * 4 * 100 * 150_000
    assert logit_bytes(shape, 112) == logit_bytes(shape, 10_000) == 3 * 4 * 111 * 150_000
    # On GPUs 1,789 tokens: 3.2 GB.
    assert logit_bytes(shape, 10_000, on_gpu=True) == 3 * 4 * 1789 * 150_000
    # A single token's are never cut.
    assert logit_bytes(replace(SMALL, vocab_size=2**25), 9) == 3 * 4 * 2**25


def test_vllms_sampler_has_the_logits_of_all_sequences() -> None:
    """Its batch is the plan's: no part of our loss, so not cut into chunks."""
    shape = replace(SMALL, vocab_size=2**22)
    memory = generation_memory(shape, 2, Layout(), sequences=256, cached_tokens=16, on_gpu=True)
    assert memory.logits == 3 * 4 * 256 * 2**22
    # Two layers' CUDA graphs and the workspaces stay while it sleeps.
    assert memory.graphs == 2 * 20 * 2**20 + 512 * 2**20
    assert memory.asleep == memory.graphs + memory.process
    assert memory.resident == memory.asleep + memory.weights


def test_memory_that_deepspeed_keeps_between_turns() -> None:
    """1,000 trained of two ranks: by stage, half-precision passes with float32 sums; then float32."""

    def kept(stage: int, float32_sums: bool) -> int:
        memory = training_memory(
            SMALL,
            2 if float32_sums else 4,
            Layout(zero_stage=stage, dp=2),
            tokens=8,
            positions=0,
            options=Options(float32_sums=float32_sums),
        )
        assert memory.resident == memory.weights + memory.optimizer + memory.kept + memory.process
        return memory.kept

    n = SMALL.num_parameters
    # ZeRO-1's sums of all gradients; ZeRO-3's shard of them, and its bucket for all: n is less than a bucket.
    assert [kept(stage, True) for stage in (1, 2, 3)] == [4 * n, 0, 4 * n // 2 + 4 * n]
    assert [kept(stage, False) for stage in (0, 1, 2, 3)] == [0, 0, 0, 4 * n // 2 + 4 * n]


# --- weight sync


def test_a_sync_needs_its_buffers() -> None:
    """An embedding of 152,000 × 4,096 in bfloat16 is more than vLLM's buffer of 1 GiB; one of 320 × 64 is not."""
    wide = replace(SMALL, vocab_size=152_000, hidden_size=4096, tied=False)
    small, large = 2**30, 2 * 152_000 * 4096
    assert (buffer_bytes(SMALL), buffer_bytes(wide)) == (small, large)

    def sending(shape: ModelShape = wide, width: int = 2, shared: bool = True, **facts: Any) -> int:
        through_host, rank = facts.pop("through_host", False), facts.pop("lora_rank", None)
        options = Options(lora_rank=rank)
        return sending_bytes(shape, width, Layout(**facts), options, through_host=through_host, shared=shared)

    assert (sending(SMALL), sending()) == (small, large)
    # A tensor that ZeRO-3 gathers, or a float32 model rounds, is there once more in bfloat16; LoRA merges in float32.
    assert sending(zero_stage=3, dp=2) == sending(width=4) == 2 * large
    assert sending(lora_rank=8) == 3 * large
    assert sending(zero_stage=3) == large
    # Through the host, as a split policy always sends, one tensor at a time; by NCCL two chunks of 1 GiB and a tensor.
    assert sending(through_host=True) == sending(tp=2) == 4 * 152_000 * 4096
    assert sending(shared=False) == 2 * (small + large)
    # The generator copies a chunk, and loads it into the embedding's module.
    assert receiving_bytes(wide, 2, 1, through_host=False, shared=True) == large + large
    assert receiving_bytes(SMALL, 2, 1, through_host=False, shared=True) == 2 * SMALL.num_parameters + 2 * 320 * 64
