"""The cost model beside speeds that others published for H100 and H200: within a factor of two.

prime-rl: `benchmarks/results/BENCHMARKS.md` of PrimeIntellect-ai/prime-rl at 30bf494f: tokens per second of its trainer
on all GPUs, with recomputation, two sequences a step for SFT. NeMo-RL: `docs/about/performance-summary.md` of
NVIDIA-NeMo/RL at 06beed91 (v0.4): seconds of an on-policy GRPO step of 2,048 replies, with a reference model.
"""

from __future__ import annotations

import pytest

from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.models.config import PretrainedBase
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.ops.planner.cost import COMPARED, GPUS, update_seconds
from xray_runtime.ops.planner.memory import PLAIN, Layout, Options
from xray_runtime.ops.planner.search import search
from xray_runtime.ops.planner.workload import OPEN_CHOICES, PlannedRole, Workload

FACTOR = 2.0
BY_NAME = {gpu.name: gpu for gpu in GPUS}


def machine(count: int, gpu: str) -> Machine:
    return Machine(num_devices=count, memory_bytes=BY_NAME[gpu].memory_bytes, devices_per_node=min(count, 8))


def role(model: str, use: str = "trained", options: Options = PLAIN) -> PlannedRole:
    shape = from_pretrained(PretrainedBase(model=model))
    return PlannedRole(name=use, shape=shape, use=use, weight_bytes=2, options=options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "gpus", "gpu", "length", "lora", "rows", "published"),
    [
        ("Qwen/Qwen3-0.6B", 1, "H100", 8192, None, 2, 26_010),
        ("Qwen/Qwen3-0.6B", 1, "H100", 16_384, None, 2, 25_490),
        ("Qwen/Qwen3-4B", 8, "H100", 16_384, None, 2, 49_720),
        ("Qwen/Qwen3-4B", 8, "H200", 16_384, None, 2, 53_140),
        # RL's trainer alone, one sequence a step.
        ("Qwen/Qwen3-0.6B", 1, "H100", 16_384, None, 1, 11_900),
        ("Qwen/Qwen3-0.6B", 1, "H100", 65_536, None, 1, 10_150),
        ("Qwen/Qwen3-4B", 8, "H100", 16_384, None, 1, 26_030),
        ("Qwen/Qwen3-4B", 8, "H100", 65_536, None, 1, 28_970),
        ("Qwen/Qwen3-4B", 8, "H200", 65_536, None, 1, 29_540),
        ("Qwen/Qwen3-0.6B", 1, "H100", 16_384, 16, 1, 13_340),
        ("Qwen/Qwen3-4B", 1, "H100", 16_384, 16, 1, 6_230),
        ("Qwen/Qwen3-4B", 1, "H100", 65_536, 16, 1, 4_160),
        ("Qwen/Qwen3-4B", 8, "H100", 16_384, 16, 1, 48_720),
        ("Qwen/Qwen3-4B", 8, "H200", 65_536, 16, 1, 33_430),
    ],
)
def test_training_takes_what_prime_rl_published(
    model: str, gpus: int, gpu: str, length: int, lora: int | None, rows: int, published: float
) -> None:
    trained = role(model, options=Options(checkpointing=True, float32_sums=True, lora_rank=lora))
    batch = rows * gpus
    workload = Workload(
        roles=(trained,),
        sequence_tokens=length,
        response_tokens=length,
        batch_size=batch,
        rollout_size=batch,
        micro_batch_tokens=length,
    )
    layout = Layout(zero_stage=3 if gpus > 1 else 1, dp=gpus)
    speed = batch * length / update_seconds(trained, layout, workload, machine(gpus, gpu))
    assert published / FACTOR < speed < published * FACTOR
    assert gpu in COMPARED


@pytest.mark.parametrize(
    ("model", "gpus", "mean_length", "published_s"),
    [
        ("meta-llama/Llama-3.1-8B", 8, 1020, 2.09e6 / 1581 / 8),  # by tokens per second and GPU, of another version
        ("meta-llama/Llama-3.1-8B", 16, 1060, 97.7),
        ("Qwen/Qwen3-32B", 32, 3206, 393.0),
    ],
)
def test_grpo_takes_what_nemo_rl_published(model: str, gpus: int, mean_length: int, published_s: float) -> None:
    """Prompts of OpenMathInstruct-2 have some 200 tokens with their template."""
    mixed = Options(float32_sums=True, least_zero_stage=1)
    roles = (role(model, options=mixed), role(model, "frozen"), role(model, "sampled"))
    workload = Workload(
        roles=roles,
        sequence_tokens=mean_length,
        response_tokens=mean_length - 200,
        batch_size=512,
        rollout_size=2048,
        micro_batch_tokens=4096,
        open_choices=OPEN_CHOICES,
    )
    found = search(workload, machine(gpus, "H100"))
    assert found.fits
    assert published_s / FACTOR < found.iteration_s < published_s * FACTOR
