"""Weights from GPU to GPU by vLLM's own engines: the same as through the object store. Needs GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import transformers

from tests.component.processes import open_models
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import PromptBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.objectives import SFTObjective

SAMPLING = Sampling(max_new_tokens=6, temperature=1.0, stop_token_ids=(1,), pad_token_id=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("transport", "num_gpus"), [("ipc", 1), ("nccl", 2)])
def test_the_generator_follows_a_trained_policy(
    cluster: None, tiny_model: Path, tmp_path: Path, transport: str, num_gpus: int
) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"{transport} needs {num_gpus} GPU(s)")
    runtime = RuntimeConfig(device="cuda", gpus_per_workhorse=num_gpus / 2, weight_transfer=transport)
    config = SFTConfig()
    specs = {
        "generator": GeneratorSpec(tiny_model, 32),
        "policy": ModelSpec(tiny_model, SFTObjective(), training=config),
    }
    ids = Ragged.of([[5, 9, 7, 42], [8, 100, 3]])
    asked, text = (
        PromptBatch(input_ids=ids, seed=np.array([1, 2])),
        TextBatch(input_ids=ids, prompt_lengths=np.array([1, 1])),
    )
    with open_models(runtime, tmp_path, specs) as models:
        generator, policy = models["generator"], models["policy"]

        def ask(version: int) -> np.ndarray:
            return ray.get(generator.generate.remote(asked, SAMPLING, version)).rollout_logprobs.values

        before = ask(0)
        ray.get(policy.train.remote(text, StepTotals(tokens=5.0), 0.05))
        ray.get(generator.follow.remote(policy, 1))
        direct = ask(1)
        assert (direct != before).any()
        # What the checksummed way brings is the same.
        ray.get(generator.load_weights.remote(ray.get(policy.export_weights.remote(2))))
        np.testing.assert_array_equal(ask(2), direct)


@pytest.mark.gpu
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_trainer_that_sleeps_gives_its_memory_and_goes_on_alike(
    cluster: None, tmp_path: Path, zero_stage: int
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("only GPU memory can be released")
    shape = transformers.LlamaConfig(vocab_size=320, hidden_size=1024, num_hidden_layers=8, intermediate_size=4096)
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path / "model")
    training = SFTConfig(engine=DeepSpeedConfig(zero_stage=zero_stage))
    rows = TextBatch(input_ids=Ragged.of(np.arange(5, 17).reshape(2, 6)), prompt_lengths=np.array([2, 3]))
    stats, asleep, awake = {}, 0, 0
    for sleeps in (False, True):
        runtime = RuntimeConfig(device="cuda", trainer_sleeps=sleeps)
        spec = ModelSpec(tmp_path / "model", SFTObjective(), training=training)
        with open_models(runtime, tmp_path / "logs", {"policy": spec}) as models:
            for _ in range(3):
                stats[sleeps] = ray.get(models["policy"].train.remote(rows, StepTotals(tokens=7.0), 1e-3))
                if sleeps:
                    awake = torch.cuda.mem_get_info()[0]
                    ray.get(models["policy"].sleep.remote())
                    asleep = torch.cuda.mem_get_info()[0]
                    ray.get(models["policy"].wake_up.remote())
    assert stats[True] == stats[False]
    # 134 million parameters with AdamW in float32 are 12 bytes each.
    assert asleep - awake > 1.5e9


@pytest.mark.gpu
def test_a_generator_that_sleeps_gives_its_memory_and_answers_alike(
    cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("vLLM sleeps on CUDA alone")
    answers, free = {}, {}
    for sleeps in (False, True):
        runtime = RuntimeConfig(device="cuda", generator_sleeps=sleeps)
        with open_models(runtime, tmp_path, {"generator": GeneratorSpec(tiny_model, 32)}) as models:
            asked = PromptBatch(input_ids=Ragged.of([[5, 9, 7, 42], [8, 100, 3]]), seed=np.array([1, 2]))
            for _ in range(2):
                answers[sleeps] = ray.get(models["generator"].generate.remote(asked, SAMPLING, 0))
            free[sleeps] = torch.cuda.mem_get_info()[0]
    for name in ("response_ids", "rollout_logprobs"):
        np.testing.assert_array_equal(answers[True][name].values, answers[False][name].values)
    assert free[True] > free[False] + 2**30
