"""Steps over several ranks: on GPUs with NCCL; rehearsed on the CPU with gloo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.gpu_acceptance.generation_steps import max_length, mismatch, prompts, sampling
from benchmarks.gpu_acceptance.setting import Setting, check
from benchmarks.gpu_acceptance.training_steps import figures, run_steps
from benchmarks.ranks import run_ranks
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.engines.topology import Topology
from xray_runtime.models.objectives import ReferenceObjective

NUM_RANKS = 2


def train_ranks(setting: Setting, **engine: Any) -> dict[str, Any]:
    """A few steps of one model on two devices: loss and gradient norm of one device."""
    spec = setting.spec(num_workhorses=NUM_RANKS, **engine)
    assert spec.training is not None
    ranks = run_ranks(spec, setting.folder / "logs", run_steps, setting.rows, device=setting.device)
    topology = Topology.of(spec.training.engine)
    reporting = [steps for rank, steps in enumerate(ranks) if topology.reports(rank)]
    losses = [sum(each) for each in zip(*(steps.losses for steps in reporting), strict=True)]
    peaks = [steps.peak_bytes for steps in ranks if steps.peak_bytes is not None]
    check(len({steps.grad_norm for steps in ranks}) == 1, "ranks disagree on the gradient norm")
    merged = replace(
        ranks[0], losses=losses, seconds=max(steps.seconds for steps in ranks), peak_bytes=max(peaks) if peaks else None
    )
    return figures(setting, spec, merged, num_gpus=NUM_RANKS if setting.device == "cuda" else 1)


def sample_ranks(setting: Setting) -> dict[str, Any]:
    """vLLM split over two devices, through the product's actors: the mismatch with the model that scores."""
    import time

    import ray

    from benchmarks.machine import start_ray
    from xray_runtime.cluster.opening import model_opener

    start_ray(num_cpus=4)
    config = GeneratorConfig(tensor_parallel=NUM_RANKS)
    spec = GeneratorSpec(setting.model, max_length(setting), config)
    log_dir, run_id = setting.folder / "vllm-tp", "gpu-acceptance"
    with model_opener(setting.runtime(), log_dir, run_id)({"generator": spec}) as models:
        asked = prompts(setting), sampling(setting), 0
        ray.get(models["generator"].generate.remote(*asked))
        start = time.perf_counter()
        replies = ray.get(models["generator"].generate.remote(*asked))
        seconds = time.perf_counter() - start
    ray.shutdown()
    frozen = FrozenConfig(precision="bfloat16" if setting.device == "cuda" else "float32")
    with setting.learner(ModelSpec(setting.model, ReferenceObjective(1.0), frozen=frozen)) as scorer:
        off = mismatch(setting, replies, scorer.score)
    return {"tokens_per_s": len(replies["response_ids"].values) / seconds, "mismatch": off}
