"""Megatron-core as a training engine: its own layers on gloo; its schedules and its optimizer where there are GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.layouts import CONFIG, collect, global_batches, run_layout, spec_of
from benchmarks.ranks import run_ranks
from tests.component.layouts import last_line, part, same
from tests.component.processes import open_models
from tests.message_texts import Messages
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import PairBatch, PromptBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.sampling import Sampling
from xray_runtime.engines.sync.object_store import unpack
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.methods.reward_model.config import RewardConfig
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.causal_lm import load_model, load_tokenizer, save_model
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import SFTObjective
from xray_runtime.models.reward_objective import RewardObjective

MEGATRON = {"library": "megatron"}


@pytest.fixture(scope="module")
def grouped_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything the small Llamas of other tests lack: grouped heads of a size of their own, an output layer of its
    own, scaled rotary frequencies, and a vocabulary that two peers cannot halve."""
    config = LlamaConfig(
        vocab_size=321,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=96,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        tie_word_embeddings=False,
    )
    directory = tmp_path_factory.mktemp("grouped")
    torch.manual_seed(5)
    lm = LlamaForCausalLM(config)
    with torch.no_grad():
        # As they are drawn the weights are so small that attention hardly matters, and a wrong head hardly shows.
        for parameter in lm.parameters():
            parameter *= 5.0 if parameter.dim() > 1 else 1.0
    save_model(lm, load_tokenizer(tiny_model), directory)
    return directory


def seen(learner: Learner, deal: Callable[[TextBatch], TextBatch], rows: TextBatch) -> tuple[TextBatch, TextBatch]:
    """Scores of `rows` and the weights as they come out again."""
    assert learner.engine is not None
    return learner.score(deal(rows)), {name: t.numpy().copy() for name, t in learner.engine.weights()}


@pytest.mark.parametrize(
    ("peers", "precision", "tolerance"),
    [
        pytest.param(1, "float32", 1e-5, marks=pytest.mark.long),
        (2, "float32", 1e-5),
        pytest.param(2, "bfloat16", 0.1, marks=pytest.mark.long),
    ],
)
def test_weights_go_in_and_out_and_score_as_in_hugging_face(
    grouped_model: Path, tmp_path: Path, peers: int, precision: str, tolerance: float
) -> None:
    batch = global_batches(grouped_model, count=1, num_rows=9)[0]
    rows = TextBatch.of_columns(batch.pick("input_ids", "prompt_lengths"))
    module = HeadedLM(load_model(grouped_model), scalar_head=True).eval()
    with torch.no_grad():
        expected = PPOObjective(CONFIG).score(module, as_tensors(rows)).logprobs.values
    spec = spec_of(
        grouped_model, MEGATRON | {"tensor_parallel": peers, "num_workhorses": peers, "precision": precision}
    )
    before = load_file(grouped_model / "model.safetensors")
    for scores, weights in run_ranks(spec, tmp_path, seen, rows):
        np.testing.assert_allclose(scores.logprobs.values, expected, atol=tolerance)
        assert weights.keys() - before.keys() == {"scalar.weight", "scalar.bias"}
        assert all(np.array_equal(weights[name], tensor) for name, tensor in before.items())


def test_a_grouped_untied_model_learns_as_in_one_process(grouped_model: Path, tmp_path: Path) -> None:
    batches = global_batches(grouped_model, count=2, num_rows=9)
    alone = run_layout(spec_of(grouped_model, {}), batches, 3, tmp_path)
    split = spec_of(grouped_model, MEGATRON | {"tensor_parallel": 2, "num_workhorses": 2}, 32)
    same(run_layout(split, batches, 3, tmp_path), alone)


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.long)], ids=["LoRA", "DoRA"])
def test_adapters_of_some_pieces_learn_as_in_one_process(grouped_model: Path, tmp_path: Path, dora: bool) -> None:
    """Megatron holds query, key and value as one matrix, interleaved by group, and gate and up as another."""
    batches = global_batches(grouped_model, count=2, num_rows=9)
    lora = {"rank": 3, "dora": dora, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
    alone = run_layout(spec_of(grouped_model, {"lora": lora}), batches, 3, tmp_path)
    split = MEGATRON | {"tensor_parallel": 2, "num_workhorses": 2, "lora": lora}
    same(run_layout(spec_of(grouped_model, split, 32), batches, 3, tmp_path), alone)
    assert {name.split(".")[-2] for name in alone.weights} == {*lora["target_modules"], "scalar"}


def test_bfloat16_passes_step_float32_weights(grouped_model: Path, tmp_path: Path) -> None:
    batches = global_batches(grouped_model, count=2, num_rows=9)
    alone = run_layout(spec_of(grouped_model, {}), batches, 4, tmp_path)
    split = spec_of(grouped_model, MEGATRON | {"tensor_parallel": 2, "num_workhorses": 2, "precision": "bfloat16"}, 32)
    run = run_layout(split, batches, 4, tmp_path)
    # Eight bits of mantissa: each product is off by up to 2^-8.
    np.testing.assert_allclose(run.losses, alone.losses, rtol=0.02, atol=0.01)
    np.testing.assert_allclose(run.norms, alone.norms, rtol=0.05)
    before = {name: tensor.numpy() for name, tensor in load_file(grouped_model / "model.safetensors").items()}
    for name, weight in before.items():
        moved, expected = run.weights[name] - weight, alone.weights[name] - weight
        assert run.weights[name].dtype == np.float32
        cosine = (moved * expected).sum() / np.linalg.norm(moved) / np.linalg.norm(expected)
        assert cosine > 0.98, name
    states = tmp_path / "states"
    run_ranks(split, tmp_path, part, batches, range(2), None, states)
    resumed = collect(split, run_ranks(split, tmp_path, part, batches, range(2, 4), states, None))
    assert all(np.array_equal(resumed.weights[name], run.weights[name]) for name in before)


def rewarded(learner: Learner, deal: Callable[[TextBatch], TextBatch], rows: TextBatch) -> TextBatch:
    """The weights after three steps of a reward model."""
    for _ in range(3):
        learner.train(deal(rows), StepTotals(rows=6.0), 1e-2)
    assert learner.engine is not None
    return {name: t.detach().numpy().copy() for name, t in learner.engine.weights()}


def test_weights_without_a_gradient_decay_as_in_one_process(grouped_model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    ids = [Ragged.of(rng.integers(5, 280, size=k) for k in rng.integers(5, 15, size=6)) for _ in range(2)]
    rows = PairBatch(input_ids=ids[0], rejected_ids=ids[1], prompt_lengths=np.ones(6, np.int64))

    def output_layer(layout: dict[str, Any]) -> np.ndarray:
        training = RewardConfig(weight_decay=0.1, engine=EngineConfig(**layout))
        spec = ModelSpec(grouped_model, RewardObjective(), training=training, new_head=True)
        return run_ranks(spec, tmp_path, rewarded, rows)[0]["lm_head.weight"]

    before = load_file(grouped_model / "model.safetensors")["lm_head.weight"].numpy()
    alone = output_layer({})
    np.testing.assert_allclose(alone, before * (1 - 0.1 * 1e-2) ** 3, rtol=1e-5)
    np.testing.assert_allclose(output_layer(MEGATRON | {"tensor_parallel": 2, "num_workhorses": 2}), alone, rtol=1e-6)


@pytest.mark.parametrize("field", ["pipeline_parallel", pytest.param("zero_stage", marks=pytest.mark.long)])
def test_cuda_options_are_refused_on_cpu(tiny_model: Path, tmp_path: Path, field: str, message_texts: Messages) -> None:
    layout = MEGATRON | {field: {"pipeline_parallel": 2, "zero_stage": 1}[field], "num_workhorses": 2}
    with pytest.raises(RuntimeError) as caught:
        run_ranks(spec_of(tiny_model, layout), tmp_path, seen, {})
    message_texts.check(last_line(caught.value))


PROMPTS = Ragged.of([[5, 9, 7, 42], [8, 100, 3], [11, 12], [44, 45, 46, 47, 48]])
TEXT = TextBatch(input_ids=PROMPTS, prompt_lengths=np.array([1, 1, 1, 2]))


def trained(model: Path, layout: dict[str, Any], logs: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """On CUDA: what three steps under `layout` say, and the weights after them."""
    training = SFTConfig(engine=EngineConfig(micro_batch_tokens=16, **layout))
    runtime = RuntimeConfig(device="cuda")
    with open_models(runtime, logs, {"policy": ModelSpec(model, SFTObjective(), training=training)}) as models:
        policy = models["policy"]
        stats = [ray.get(policy.train.remote(TEXT, StepTotals(tokens=9.0), 1e-3)) for _ in range(3)]
        update = ray.get(policy.export_weights.remote(1))
        weights = {name: t.clone() for bucket in update.buckets for name, t in unpack(bucket)}
    return stats, weights


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layout", "num_gpus"),
    [
        ({"zero_stage": 1}, 1),
        ({"zero_stage": 1, "num_workhorses": 2}, 2),
        ({"pipeline_parallel": 2, "num_workhorses": 2}, 2),
        ({"tensor_parallel": 2, "pipeline_parallel": 2, "zero_stage": 1, "num_workhorses": 8}, 8),
    ],
)
def test_schedules_and_distributed_optimizer_change_nothing(
    cluster: None, tiny_model: Path, tmp_path: Path, layout: dict[str, int], num_gpus: int
) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"the layout needs {num_gpus} GPU(s)")
    expected, expected_weights = trained(tiny_model, {}, tmp_path)
    found, weights = trained(tiny_model, MEGATRON | layout, tmp_path)
    for key in ("nll", "grad_norm"):
        np.testing.assert_allclose([s[key] for s in found], [s[key] for s in expected], rtol=1e-4)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
def test_vllm_samples_from_what_megatron_trained(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 1:
        pytest.skip("vLLM beside Megatron's optimizer needs a GPU")
    runtime = RuntimeConfig(device="cuda", gpus_per_workhorse=0.5)
    training = CONFIG.model_copy(update={"engine": DeepSpeedConfig(zero_stage=1, **MEGATRON)})
    specs = {
        "generator": GeneratorSpec(tiny_model, 32),
        "policy": ModelSpec(tiny_model, SFTObjective(), training=training),
    }
    asked = PromptBatch(input_ids=PROMPTS, seed=np.arange(4))
    sampling = Sampling(max_new_tokens=6, temperature=1.0, stop_token_ids=(1,), pad_token_id=0)
    with open_models(runtime, tmp_path, specs) as models:
        generator, policy = models["generator"], models["policy"]
        ray.get(policy.train.remote(TEXT, StepTotals(tokens=9.0), 0.05))
        ray.get(generator.follow.remote(policy, 1))
        replies = ray.get(generator.generate.remote(asked, sampling, 1))
        scored = TextBatch.of([ids.tolist() for ids in PROMPTS], replies.response_ids)
        nll = ray.get(policy.score.remote(scored)).nll
    # vLLM computes in 16 bits on a GPU.
    np.testing.assert_allclose(nll, -replies.rollout_logprobs.dense().sum(axis=1), atol=0.1 * sampling.max_new_tokens)
