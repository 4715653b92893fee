"""The planner: placements, properties, and changes that help where nothing fits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import validate
from xray_runtime.planning.memory import PROCESS_BYTES, Layout, Memory, kv_cache_bytes
from xray_runtime.planning.plan import make_plan
from xray_runtime.planning.suggestions import suggest
from xray_runtime.planning.workload import GIB, Machine, Workload, from_config, from_parameters

ROOT = Path(__file__).parents[2]


def machine(num_devices: int, gib: float = 80) -> Machine:
    return Machine(num_devices=num_devices, memory_bytes=int(gib * GIB))


# --- properties

LAYOUTS = st.builds(
    Layout,
    zero_stage=st.integers(0, 3),
    dp=st.integers(2, 512),
    tp=st.sampled_from([1, 2, 4]),
    checkpointing=st.booleans(),
)
COUNTS = st.sampled_from([3e6, 1e8, 1e9, 7e9, 70e9])
ROLES = st.integers(0, 4)


@given(COUNTS, ROLES, LAYOUTS, st.integers(1, 100))
def test_more_ranks_never_need_more_memory(count: float, index: int, layout: Layout, more: int) -> None:
    workload = from_parameters(count, 1024)
    role = workload.roles[index]
    before = workload.memory(role, layout)
    after = workload.memory(role, replace(layout, dp=layout.dp + more))
    assert all(getattr(after, f.name) <= getattr(before, f.name) for f in fields(Memory))
    split = workload.memory(role, replace(layout, tp=layout.tp * 2))
    assert split.total <= before.total


@given(COUNTS, ROLES, LAYOUTS, st.integers(1, 9000), st.integers(1, 9000))
def test_longer_sequences_never_need_less(count: float, index: int, layout: Layout, short: int, more: int) -> None:
    # Even lengths: half of them is reply.
    few, many = from_parameters(count, 2 * short), from_parameters(count, 2 * (short + more))
    assert few.memory(few.roles[index], layout).total <= many.memory(many.roles[index], layout).total


@settings(max_examples=40)
@given(COUNTS, st.integers(1, 200), st.integers(1, 50), st.sampled_from([16, 40, 80]))
def test_what_fits_still_fits_on_more(count: float, devices: int, more: int, gib: int) -> None:
    workload = from_parameters(count, 1024)
    if make_plan(workload, machine(devices, gib)).fits:
        assert make_plan(workload, machine(devices + more, gib)).fits
        assert make_plan(workload, machine(devices, gib + more)).fits


@settings(max_examples=40)
@given(COUNTS, st.integers(1, 300), st.sampled_from([4, 24, 80, 141]), st.sampled_from([64, 2048, 32768]))
def test_a_plan_keeps_to_the_machine(count: float, devices: int, gib: int, length: int) -> None:
    workload = from_parameters(count, length)
    plan = make_plan(workload, machine(devices, gib))
    assert plan == make_plan(workload, machine(devices, gib))
    assert [p.role for p in plan.roles] == list(workload.roles) or plan.placement == "tensor-parallel generator"
    assert {p.role.name for p in plan.roles} == {role.name for role in workload.roles}
    needed = [0] * devices
    for p in plan.roles:
        assert p.layout.num_devices == len(p.devices)
        assert p.devices.stop <= devices
        assert p.role.use != "train" or p.layout.dp <= workload.batch_size
        assert p.role.shape.num_heads % p.layout.tp == 0
        for device in p.devices:
            needed[device] += p.memory.total
    if plan.fits and not any(group.in_turn for group in plan.groups):
        assert max(needed) <= 0.9 * gib * GIB
    if plan.placement == "separate":
        assert sum(len(p.devices) for p in plan.roles) == len({d for p in plan.roles for d in p.devices})


def test_the_cache_holds_enough_and_no_more() -> None:
    # In tokens: 32 sequences of 1,024; of longer ones as many as make 65,536 tokens; one in any case; a small rollout.
    def cached(length: int, dp: int = 1) -> float:
        workload = from_parameters(7e9, length)
        memory = workload.memory(workload.roles[-1], Layout(dp=dp))
        return memory.kv_cache / kv_cache_bytes(workload.roles[-1].shape, 1, 2)

    assert (cached(1024), cached(8192), cached(100_000), cached(1024, dp=256)) == (32 * 1024, 65_536, 100_000, 2 * 1024)


# --- placement


@pytest.mark.parametrize(
    ("count", "devices", "placement"),
    [
        (1e8, 1, "colocated"),
        (1e8, 8, "colocated"),
        (1e9, 8, "colocated"),
        (7e9, 8, "separate"),
        (7.5e9, 64, "separate"),
        (13e9, 16, "separate"),
        (70e9, 64, "tensor-parallel generator"),
        (70e9, 128, "tensor-parallel generator"),
    ],
)
def test_small_share_middle_have_their_own_large_are_split(count: float, devices: int, placement: str) -> None:
    plan = make_plan(from_parameters(count, 1024), machine(devices))
    assert plan.fits
    assert plan.placement == placement
    layouts = {p.role.name: p.layout for p in plan.roles}
    if placement == "tensor-parallel generator":
        assert layouts["generator"].tp > 1
        assert {layouts[name].zero_stage for name in ("policy", "critic", "reference", "reward")} == {3}
    else:
        assert layouts["generator"].tp == 1


def test_a_generator_that_sleeps_makes_room() -> None:
    together = make_plan(from_parameters(1e9, 1024), machine(1, 72))
    in_turn = make_plan(from_parameters(1e9, 1024), machine(1, 52))
    assert together.fits
    assert not together.fullest.in_turn
    assert in_turn.fits
    assert in_turn.placement == "colocated"
    assert in_turn.fullest.in_turn
    generator = in_turn.roles[-1].memory
    others = sum(p.memory.total for p in in_turn.roles[:-1])
    assert in_turn.fullest.peak_bytes == others + PROCESS_BYTES
    assert generator.total + others > 0.9 * 52 * GIB


def test_spare_devices_go_where_the_work_is() -> None:
    plan = make_plan(from_parameters(7.5e9, 1024), machine(64))
    count = {p.role.name: len(p.devices) for p in plan.roles}
    assert sum(count.values()) == 64
    assert count["policy"] > 2 * count["reference"]
    assert abs(count["policy"] - count["generator"]) <= 1


# --- where nothing fits

HOPELESS = [(7e9, 2, 40), (7e9, 4, 80), (70e9, 8, 80), (1e9, 1, 8), (1e8, 1, 2), (405e9, 64, 80)]


@pytest.mark.parametrize(("count", "devices", "gib"), HOPELESS)
def test_every_suggestion_fits_when_applied(count: float, devices: int, gib: int) -> None:
    workload, there = from_parameters(count, 1024), machine(devices, gib)
    plan = make_plan(workload, there)
    assert not plan.fits
    assert plan.fullest.peak_bytes > there.usable_bytes
    suggestions = list(suggest(workload, there))
    assert "memory_gib" in {s.change for s in suggestions}
    for suggestion in suggestions:
        assert str(suggestion.value) in suggestion.text or suggestion.change == "offload"
        assert make_plan(*suggestion.apply(workload, there)).fits
        if suggestion.change in ("num_devices", "memory_gib"):
            less = replace(suggestion, value=suggestion.value - 1)
            assert not make_plan(*less.apply(workload, there)).fits


def test_each_kind_of_change_is_suggested_where_it_helps() -> None:
    found = {s.change for args in HOPELESS for s in suggest(from_parameters(args[0], 1024), machine(*args[1:]))}
    assert {"num_devices", "memory_gib", "lora_rank", "offload"} <= found
    wide = replace(from_parameters(1e9, 1024), micro_batch_tokens=2**19)
    (narrower,) = [s for s in suggest(wide, machine(1)) if s.change == "micro_batch_tokens"]
    assert 1024 <= narrower.value < 2**19
    assert make_plan(*narrower.apply(wide, machine(1))).fits
    long = from_parameters(1e9, 200_000)
    (shorter,) = [s for s in suggest(long, machine(1)) if s.change == "sequence_tokens"]
    assert make_plan(*shorter.apply(long, machine(1))).fits
    assert not make_plan(*replace(shorter, value=shorter.value + 1).apply(long, machine(1))).fits


# --- config


def configured(**changes: Any) -> Workload:
    return from_config(validate(changes), "cpu")


def test_roles_follow_the_config() -> None:
    assert [r.name for r in configured().roles] == ["policy", "reference", "reward", "generator"]
    separate = configured(ppo={"stages": [{}, {"critic": "separate"}]})
    assert [r.name for r in separate.roles] == ["policy", "reference", "critic", "reward", "generator"]
    shared = configured(base={"kind": "pretrained", "model": "smollm2-135m", "trainable_layers": 2})
    assert [r.name for r in shared.roles] == ["policy", "reward", "generator"]
    assert shared.roles[0].top_layers == 2


def test_lengths_and_batches_follow_the_config() -> None:
    stages = [
        {"max_new_tokens": 8, "minibatch_size": 16, "engine": {"micro_batch_tokens": 512}},
        {"max_new_tokens": 24, "prompts_per_iteration": 128},
    ]
    workload = configured(data={"max_prompt_tokens": 40}, ppo={"stages": stages})
    assert (workload.sequence_tokens, workload.response_tokens) == (64, 24)
    assert (workload.batch_size, workload.rollout_size, workload.micro_batch_tokens) == (16, 128, 4096)


def test_precision_follows_the_device() -> None:
    assert {r.name: r.weight_bytes for r in configured().roles}["generator"] == 4
    on_gpu = from_config(LifecycleConfig(), "cuda")
    assert {r.name: r.weight_bytes for r in on_gpu.roles} == {"policy": 4, "reference": 4, "reward": 4, "generator": 2}


def test_vllms_cache_on_cpu_is_what_it_reserves() -> None:
    workload = configured(runtime={"generator_memory_gib": 2.0})
    assert workload.memory(workload.roles[-1], Layout()).kv_cache == 2 * GIB


def test_planning_loads_no_engine() -> None:
    heavy = {"torch", "ray", "prefect", "deepspeed", "vllm", "transformers"}
    code = (
        "import sys, xray_runtime.planning.suggestions as s, xray_runtime.planning.workload as w\n"
        "list(s.suggest(w.from_parameters(7e9, 1024), w.Machine(num_devices=1, memory_bytes=2**33)))\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
