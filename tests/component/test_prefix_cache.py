"""vLLM's prefix cache on CPU: it changes no reply and no log-probability, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from safetensors.torch import load_file

from tests.component.models import same
from xray_runtime.data.batch import TextBatch
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.kernel.config.section import RuntimeConfig

GROUPS, SAMPLES, PROMPT, TURN = 5, 8, 40, 12
"""A prompt has a whole block of 32 tokens; a second turn's prompt is the first and its continuation."""


@ray.remote(num_cpus=0, max_calls=1)
def _replies(directory: Path, caching: bool) -> tuple[list[TextBatch], list[int], int]:
    """(replies of five calls, tokens that each call found in the cache, blocks of the cache), from an engine in a
    process of its own."""
    import vllm

    found: list[int] = []

    class LLM(vllm.LLM):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"enable_prefix_caching": caching})

        def generate(self, *args: Any, **options: Any) -> Any:
            outputs = super().generate(*args, **options)
            found.append(sum(output.num_cached_tokens or 0 for output in outputs))
            return outputs

    vllm.LLM = LLM
    engine: Any = Generation(directory, 64, GeneratorConfig(), RuntimeConfig(threads=1), EngineRank("cpu"))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(5, 280, PROMPT).tolist() for _ in range(GROUPS)]
    many = [prompt for prompt in prompts for _ in range(SAMPLES)]
    later = [prompt + rng.integers(5, 280, TURN).tolist() for prompt in many]
    sampling = Sampling(max_new_tokens=6, temperature=0.7, stop_token_ids=(1,), pad_token_id=0)
    seeds = list(range(len(many)))

    def sample(asked: list[list[int]], of: list[int]) -> TextBatch:
        return engine.generate(asked, of, sampling, engine.weights.version)

    calls = [sample(many, seeds), sample(many[9:10], seeds[9:10]), sample(later, seeds)]
    weights = load_file(directory / "model.safetensors")
    engine._sampler.write(((name, tensor * 1.5) for name, tensor in sorted(weights.items())), 0)
    blocks = engine._sampler._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    return [*calls, sample(many, seeds), sample(later[3:4], seeds[3:4])], found, blocks


@pytest.mark.long  # two engines of vLLM; that a reply is the same to the bit beside others is in `test_generator`
@pytest.mark.usefixtures("cluster")
def test_the_cache_changes_no_bit(tiny_model: Path) -> None:
    """In groups, alone, in a second turn, and with other weights."""
    variables = {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO"}
    run = _replies.options(runtime_env={"env_vars": variables})
    (cached, found, blocks), (plain, nothing, _) = ray.get(
        [run.remote(tiny_model, caching) for caching in (True, False)]
    )
    for with_cache, without in zip(cached, plain, strict=True):
        same(with_cache, without)
    assert nothing == [0] * 5
    # All but the first reply of a group share its block, then all do; a weight update empties the cache.
    groups, rows = GROUPS * (SAMPLES - 1), GROUPS * SAMPLES
    assert found == [32 * groups, 32, 32 * rows, 32 * groups, 32]
    # 256 sequences of 64 tokens in blocks of 32, and as many again: not all that a GiB would hold.
    assert blocks == 2 * 256 * 2
    assert not np.array_equal(cached[0].rollout_logprobs.values, cached[3].rollout_logprobs.values)
