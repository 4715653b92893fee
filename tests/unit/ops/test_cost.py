"""The cost model: closed forms by hand, and what must never make an iteration slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from xray_runtime.cluster.pool.machine import GIB, Machine
from xray_runtime.models.config import PretrainedBase
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.ops.planner.cost import (
    GPUS,
    forward_flops,
    generate_seconds,
    gpu_of,
    score_seconds,
    sync_seconds,
    update_seconds,
)
from xray_runtime.ops.planner.disk import disk_bytes
from xray_runtime.ops.planner.memory import Layout
from xray_runtime.ops.planner.workload import PlannedRole, Workload, from_parameters

L4, _, H100, _ = GPUS


def machine(count: int, gpu: Any = H100) -> Machine:
    return Machine(num_devices=count, memory_bytes=gpu.memory_bytes, devices_per_node=min(count, 8))


def policy(workload: Workload) -> PlannedRole:
    return workload.roles[0]


BASE = from_parameters(8e9, 2048)


def test_the_nearest_gpu_is_taken() -> None:
    assert [gpu_of(gib * GIB).name for gib in (16, 24, 40, 48, 80, 96, 141, 192)] == [
        *("L4", "L4", "L40S", "L40S", "H100", "H100", "H200", "H200")
    ]


def test_flops_by_hand() -> None:
    """Two a weight and token, logits of the reply alone, and attention of half the square of the length."""
    shape = policy(BASE).shape
    layers = (shape.num_parameters - 2 * shape.embedding_parameters - shape.hidden_size) * 2 * 2048
    logits = 2 * shape.embedding_parameters * 1024
    # Scores and their product with the values: 2 · 2 · S²/2 · h a layer.
    attention = shape.num_layers * 2 * 2048 * 2048 * shape.hidden_size
    assert forward_flops(policy(BASE), BASE) == pytest.approx(layers + logits + attention, rel=1e-6)


def test_passes_are_counted() -> None:
    """One GPU, passes of 16,384 tokens: 40% of 989 TFLOP/s less what small passes lose, and one optimizer step."""
    one = replace(BASE, micro_batch_tokens=16_384, batch_size=512)
    role, there = policy(one), machine(1)
    flops = 512 * forward_flops(role, one)
    rate = 0.4 * 989e12 * 16_384 / (16_384 + 512)
    # 28 bytes a parameter at 70% of 3.35 TB/s.
    memory = 0.7 * 3.35e12
    step = role.shape.num_parameters * 28 / memory
    # In one pass three times what a layer keeps of a token: two norms of 8 · h + 4, attention 10 · h and 4 a head, the
    # MLP 8 · i. Half of the tokens have logits.
    h, layers, heads, vocabulary = role.shape.hidden_size, role.shape.num_layers, role.shape.num_heads, 32_000
    kept = 2 * (8 * h + 4) + 10 * h + 4 * heads + 8 * role.shape.intermediate_size
    tokens = 512 * 2048
    layer_traffic = tokens * layers * 3 * kept / memory
    # Training moves 106 bytes a logit, and the output layer seven times for every 2²⁸ of them; a forward pass 40, once.
    logits = tokens / 2 * vocabulary
    training = logits * (106 + 7 * 2 * h * vocabulary / (2**28 // vocabulary * vocabulary)) / memory
    scoring = logits * (40 + 2 * h * vocabulary / (2**28 // vocabulary * vocabulary)) / memory
    expected = 3 * flops / rate + 3 * layer_traffic + training + step
    assert update_seconds(role, Layout(), one, there) == pytest.approx(expected, rel=1e-3)
    scored = score_seconds(role, Layout(), replace(one, score_tokens=16_384), there)
    assert scored == pytest.approx(flops / rate + layer_traffic + scoring, rel=1e-3)
    again = one.with_options(checkpointing=True)
    expected += flops / rate + layer_traffic
    assert update_seconds(policy(again), Layout(), again, there) == pytest.approx(expected, rel=1e-3)
    adapters = one.with_options(lora_rank=16)
    expected = 2 * flops / rate + 3 * layer_traffic + training
    assert update_seconds(policy(adapters), Layout(), adapters, there) == pytest.approx(expected, rel=1e-2)


def test_a_rollout_reads_the_weights_at_each_step() -> None:
    """One sequence at a time: 1,024 steps, each of 16 GB at 2.3 TB/s, 4 ms and its cache."""
    alone = replace(BASE, rollout_size=1)
    generator = alone.roles[-1]
    weights = 16e9 / (0.7 * 3.35e12)
    seconds = generate_seconds(generator, Layout(), alone, machine(1))
    assert seconds == pytest.approx(1024 * (weights + 4e-3), rel=0.1)
    # Replicas share the rows; more sequences at a time read the weights less often.
    many = replace(BASE, cache_scale=4)
    eight = generate_seconds(generator, Layout(dp=8), many, machine(8))
    assert eight == pytest.approx(generate_seconds(generator, Layout(), many, machine(1)) / 8, rel=0.05)
    assert generate_seconds(generator, Layout(), replace(many, cache_scale=8), machine(1)) < 8 * eight


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_more_replicas_never_take_longer(stage: int) -> None:
    wide = replace(BASE, micro_batch_tokens=8192)
    seconds = [update_seconds(policy(wide), Layout(zero_stage=stage, dp=dp), wide, machine(64)) for dp in (8, 16, 64)]
    assert seconds == sorted(seconds, reverse=True)


def test_slow_links_change_what_is_fastest() -> None:
    """ZeRO-3 gathers all weights twice a pass: slow networks show it, fast ones hide it."""
    small = replace(BASE, micro_batch_tokens=2048)

    def ratio(gpu: Any) -> float:
        by_stage = [
            update_seconds(policy(small), Layout(zero_stage=stage, dp=64), small, machine(64, gpu)) for stage in (1, 3)
        ]
        return by_stage[1] / by_stage[0]

    assert ratio(L4) > 1.2 * ratio(H100)
    assert ratio(H100) > 1


def test_weights_through_host_memory_take_seconds() -> None:
    size = policy(BASE).shape.num_parameters
    there = machine(8)
    through = sync_seconds(policy(BASE), Layout(dp=8), replace(BASE, through_host=True), there, shared=True)
    assert through == pytest.approx(4 * size / 1.3e9)
    direct = sync_seconds(policy(BASE), Layout(dp=8), BASE, there, shared=True)
    assert direct < through / 100
    # A split policy has no direct way.
    assert sync_seconds(policy(BASE), Layout(tp=8), BASE, there, shared=True) == through


def test_disk_by_hand() -> None:
    generator = replace(BASE.roles[-1], kept_rollouts=10)
    kept = replace(BASE, roles=(*BASE.roles[:-1], generator))
    size = policy(BASE).shape.num_parameters
    assert disk_bytes(kept) == {
        "checkpoint": 4 * size,
        # Policy and critic, two snapshots.
        "snapshots": pytest.approx(2 * 2 * 12 * size, rel=1e-6),
        "ledger": 10 * 512 * 2048 * 24,
    }
    assert disk_bytes(replace(BASE, roles=BASE.roles[3:4])) == {}
    # With 20 likeliest tokens at each place 20 × 8 bytes more.
    top = replace(BASE, roles=(*BASE.roles[:-1], replace(generator, kept_top_tokens=20)))
    assert disk_bytes(top)["ledger"] == 10 * 512 * 2048 * (24 + 20 * 8)
    # With routes, 48 layers × 8 experts × 5 bytes a token more.
    mixture = replace(generator, shape=from_pretrained(PretrainedBase(model="Qwen/Qwen3-30B-A3B")), keeps_routes=True)
    routed = disk_bytes(replace(BASE, roles=(*BASE.roles[:-1], mixture)))
    assert routed["ledger"] == 10 * 512 * 2048 * (24 + 48 * 8 * 5)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
    ],
)
def test_known_models_have_their_published_sizes(name: str, parameters: int) -> None:
    assert from_pretrained(PretrainedBase(model=name)).num_parameters == parameters
