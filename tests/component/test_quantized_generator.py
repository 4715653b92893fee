"""vLLM with matrices in 8 bits: near the policy, and after an update near the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from xray_runtime.engines.generators.vllm import GENERATOR
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Reply, Sampling
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.common.mismatch import BFLOAT16_MISMATCH, FLOAT32_MISMATCH
from xray_runtime.models.causal_lm import load_model

RUNTIME = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.25)
SAMPLING = Sampling(max_new_tokens=8, temperature=1.0, stop_token_ids=(1,), pad_token_id=0)
PROMPTS, SEEDS = [[5, 9, 12, 40], [7, 8], [30, 31, 32]] * 4, list(range(12))


@ray.remote(num_cpus=0)
def sampled(model: Path, changed: Path) -> tuple[list[Reply], list[Reply]]:
    """Replies of the model, and after an update with other weights; in a process whose vLLM ends with it."""
    config = GeneratorConfig.model_validate({"engine": "vllm", "quantization": "fp8"})
    sampler = GENERATOR.sampler(model, 64, config, RUNTIME, EngineRank("cpu"))
    before = sampler.sample(PROMPTS, SEEDS, SAMPLING)
    sampler.write(iter(load_file(changed).items()), 1)
    return before, sampler.sample(PROMPTS, SEEDS, SAMPLING)


def mismatch(model: Path, weights: Path, replies: list[Reply]) -> float:
    """Mean |log-probability difference| to transformers in float32, in nats a token."""
    lm = load_model(model)
    lm.load_state_dict(load_file(weights), strict=False)
    found = []
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        with torch.no_grad():
            logits = lm(torch.tensor([prompt + reply.token_ids])).logits[0, len(prompt) - 1 : -1]
        own = logits.double().log_softmax(-1).gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]
        found += (own - torch.tensor(reply.logprobs)).abs().tolist()
    return sum(found) / len(found)


def test_replies_are_of_the_weights_in_8_bits(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    [file] = tiny_model.glob("*.safetensors")
    torch.manual_seed(0)
    tensors = {name: t + 0.02 * torch.randn_like(t) if t.dim() == 2 else t for name, t in load_file(file).items()}
    save_file(tensors, changed := tmp_path / "changed.safetensors")
    before, after = ray.get(sampled.remote(tiny_model, changed))
    for weights, other, replies in ((file, changed, before), (changed, file, after)):
        assert FLOAT32_MISMATCH < mismatch(tiny_model, weights, replies) < BFLOAT16_MISMATCH
        assert mismatch(tiny_model, other, replies) > BFLOAT16_MISMATCH


@pytest.mark.parametrize("given", [{"tensor_parallel": 2}, {"quantization": "int4"}])
def test_other_forms_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"quantization"):
        GeneratorConfig.model_validate({"engine": "vllm", "quantization": "fp8"} | given)
