"""The planner: published figures, hand arithmetic, what transformers and autograd really hold, and properties."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flows.cli import app
from xray_runtime.config import FreshBase, LifecycleConfig, PretrainedBase
from xray_runtime.config_io import validate
from xray_runtime.planning.memory import (
    PROCESS_BYTES,
    Layout,
    Memory,
    activation_bytes,
    device_parameters,
    kv_cache_bytes,
    layer_activation_bytes,
    lora_parameters,
    model_states,
    training_memory,
)
from xray_runtime.planning.plan import Plan, make_plan
from xray_runtime.planning.shapes import ModelShape, from_fresh, from_hf_config, from_parameter_count, from_pretrained
from xray_runtime.planning.suggestions import suggest
from xray_runtime.planning.workload import GIB, Machine, Workload, from_config, from_parameters

ROOT = Path(__file__).parents[2]
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
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
LLAMA_3_8B = LLAMA_2_7B | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}


def machine(num_devices: int, gib: float = 80) -> Machine:
    return Machine(num_devices=num_devices, memory_bytes=int(gib * GIB))


# --- model states


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_papers_figure_1(stage: int, gigabytes: float) -> None:
    """7.5 billion parameters, 64 devices, mixed-precision Adam (Rajbhandari et al. 2020)."""
    assert round(sum(model_states(7.5e9, 7.5e9, 2, stage, 64)) / 1e9, 1) == gigabytes


def test_states_of_a_float32_model() -> None:
    # 1,000 parameters: 4 bytes of weight, 4 of gradient, 8 of moments; ZeRO 1 and 2 add a master copy of 4.
    assert [sum(model_states(1000, 1000, 4, stage, 4)) for stage in range(4)] == [
        4000 + 4000 + 8000,
        4000 + 4000 + 12000 / 4,
        4000 + 4000 / 4 + 12000 / 4,
        (4000 + 4000 + 8000) / 4,
    ]


def test_lora_trains_its_adapters_alone() -> None:
    # A layer's projections, in + out: q 64+64, k and v 64+32, o 64+64, gate, up and down 64+128; rank 4, two layers.
    assert lora_parameters(SMALL, 4) == 4 * 2 * (128 + 2 * 96 + 128 + 3 * 192)
    adapters = lora_parameters(SMALL, 4)
    memory = training_memory(SMALL, 2, Layout(), tokens=8, positions=0, lora_rank=4)
    assert memory.weights == 2 * (SMALL.num_parameters + adapters)
    assert memory.gradients == 2 * adapters
    assert memory.optimizer == 12 * adapters


def test_a_frozen_trunk_has_weights_only() -> None:
    trained = SMALL.layer_parameters() + 64  # the top layer and the final norm
    memory = training_memory(SMALL, 4, Layout(), tokens=8, positions=0, top_layers=1, reference_branch=True)
    assert memory.weights == 4 * (SMALL.num_parameters + trained)
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)


def test_offload_leaves_no_optimizer_on_the_device() -> None:
    assert training_memory(SMALL, 2, Layout(zero_stage=2, dp=2), tokens=8, positions=0, offload=True).optimizer == 0


# --- shapes


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_3_8B, 8_030_261_248),
        (
            LLAMA_2_7B
            | {
                "model_type": "qwen2",
                "num_hidden_layers": 28,
                "hidden_size": 3584,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "intermediate_size": 18944,
                "vocab_size": 152064,
            },
            7_615_616_512,
        ),
    ],
    ids=["Llama-2-7B", "Llama-3-8B", "Qwen2-7B"],
)
def test_published_parameter_counts(config: dict[str, Any], parameters: int) -> None:
    assert from_hf_config(config).num_parameters == parameters


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


def test_our_own_llama_and_the_packaged_one() -> None:
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
    smollm = from_pretrained(PretrainedBase(model="smollm2-135m"))
    assert smollm.num_parameters == 134_515_008
    assert (smollm.num_layers, smollm.num_heads, smollm.num_kv_heads, smollm.tied) == (30, 9, 3, True)


def test_a_directory_is_read_without_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert from_pretrained(PretrainedBase(model=str(tmp_path))).num_parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2", "intermediate_size": None}, "'gpt2' model cannot be planned: its config has no interm"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixtures of experts"),
    ],
)
def test_what_is_no_llama_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf_config(LLAMA_2_7B | change)


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
    # One token, float32. Norms: 2 · (64 · (4 + 4 + 4) + 4) = 1,544. Attention: q and output 2 · 64, k and v 2 · 32, of
    # 4 bytes each, and 2 log-sums of 4: 776. MLP: 4 · 128 · 4 = 2,048.
    assert layer_activation_bytes(SMALL, 1, 4) == 1544 + 776 + 2048
    assert layer_activation_bytes(SMALL, 10, 4) == 10 * (1544 + 776 + 2048)
    # bfloat16: norms 2 · (64 · (4 + 2 + 2) + 4) = 1,032; attention 192 · 2 + 8 = 392; MLP 1,024.
    assert layer_activation_bytes(SMALL, 1, 2) == 1032 + 392 + 1024
    # Two tensor-parallel ranks: one head each, the one key-value head on both; 32 + 32 + 2 · 32, and one log-sum.
    assert layer_activation_bytes(SMALL, 1, 4, tp=2) == 1544 + (4 * 128 + 4) + 1024


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_activations_are_what_autograd_saves(kv_heads: int, dtype: str, width: int, checkpointing: bool) -> None:
    import torch
    import transformers

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
    model = transformers.LlamaModel(config).to(getattr(torch, dtype)).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    rows, length = 3, 40
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(input_ids=torch.zeros((rows, length), dtype=torch.int64)).last_hidden_state
    keep(out)
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    tables = rows * length * 8  # the token ids
    if not checkpointing:
        tables += 2 * length * 32 * width  # cosines and sines of the positions, the same for all rows and layers
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) - tables
    predicted = activation_bytes(shape, rows * length, width, Layout(checkpointing=checkpointing))
    if checkpointing:
        # The forward pass keeps no layer's inside; the backward pass makes one at a time.
        predicted -= layer_activation_bytes(shape, rows * length, width)
    assert measured == pytest.approx(predicted, rel=1e-2)


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


@settings(max_examples=40, deadline=None)
@given(COUNTS, st.integers(1, 200), st.integers(1, 50), st.sampled_from([16, 40, 80]))
def test_what_fits_still_fits_on_more(count: float, devices: int, more: int, gib: int) -> None:
    workload = from_parameters(count, 1024)
    if make_plan(workload, machine(devices, gib)).fits:
        assert make_plan(workload, machine(devices + more, gib)).fits
        assert make_plan(workload, machine(devices, gib + more)).fits


@settings(max_examples=40, deadline=None)
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


# --- the command


def xray_plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    outcome = xray_plan(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.output
    content: dict[str, Any] = json.loads(outcome.stdout)
    return content


PAPER = ("--params", "7.5e9", "--devices", "64", "--memory-gib", "80")


def test_the_json_contract() -> None:
    content = planned(*PAPER)
    assert content["fits"] is True
    assert content["placement"] == "separate"
    assert {k: round(v, 1) for k, v in content["model_state_gb"].items()} == {
        "0": 120.0,
        "1": 31.4,
        "2": 16.6,
        "3": 1.9,
    }
    roles = {"policy", "reference", "critic", "reward", "generator"}
    assert content["layout"].keys() == content["memory_gb"].keys() == content["breakdown_gb"].keys() == roles
    for name, layout in content["layout"].items():
        assert layout.keys() == {"zero_stage", "tp", "pp", "dp", "checkpointing", "devices"}
        first, last = layout["devices"]
        assert last - first + 1 == layout["tp"] * layout["pp"] * layout["dp"]
        assert content["memory_gb"][name] == pytest.approx(sum(content["breakdown_gb"][name].values()), abs=1e-3)
        assert content["memory_gb"][name] <= content["usable_gb"] == pytest.approx(0.9 * 80 * 1.073741824, abs=1e-3)
    assert content["peak_gb"] == max(content["memory_gb"].values())
    assert content["limits"] == ["devices 0–17 need 65.1 of 77.3 usable GB, most of it policy's activations (27.5 GB)"]
    assert content["reasons"] == ["colocated: needs 102 GB a device, 77.3 GB are usable"]
    assert content["suggestions"] == []


def test_where_nothing_fits_the_options_of_the_command_are_suggested() -> None:
    """Each suggestion can be given to the same command, which then has a plan."""
    content = planned("--params", "7e9", "--devices", "4", "--memory-gib", "80")
    assert content["fits"] is False
    assert content["peak_gb"] > content["usable_gb"]
    by_change = {s["change"]: s["value"] for s in content["suggestions"]}
    assert planned("--params", "7e9", "--devices", str(by_change["num_devices"]), "--memory-gib", "80")["fits"]
    assert planned("--params", "7e9", "--devices", "4", "--memory-gib", str(by_change["memory_gib"]))["fits"]
    same = ("--params", "7e9", "--devices", "4", "--memory-gib", "80")
    assert planned(*same, "--lora-rank", str(by_change["lora_rank"]))["fits"]
    assert planned(*same, "--offload")["fits"]


@pytest.mark.parametrize("preset", sorted(p.name for p in (ROOT / "configs").glob("*.yaml") if p.stem != "custom"))
def test_every_preset_that_needs_no_hub_has_a_plan_here(preset: str) -> None:
    content = planned(str(ROOT / "configs" / preset))
    assert content["num_devices"] >= 1
    assert content["placement"] in ("colocated", "separate", "tensor-parallel generator")


def test_people_see_a_table_and_reasons() -> None:
    outcome = xray_plan("--params", "70e9", "--devices", "8", "--memory-gib", "80")
    assert outcome.exit_code == 0
    for words in (
        "nothing fits; nearest: tensor-parallel generator",
        "recompute",
        "limit",
        "would fit with  64 devices",
    ):
        assert words in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "CONFIG, --params: neither is given, must be one of them"),
        (["configs/tiny.yaml", "--params", "1e9"], "CONFIG, --params: both are given, must be one of them"),
        (["--params", "many"], '--params: "many" is not allowed: must be a number from 1e+06 to 1e+13'),
        (["--params", "-7e9"], "--params: -7e9 is not allowed: must be a number from 1e+06 to 1e+13"),
        (["--params", "inf"], "--params: inf is not allowed: must be a number from"),
        (["--params", "1e9", "--devices", "0"], "--devices: 0 is not allowed: must be a whole number from 1 to 65536"),
        (["--params", "1e9", "--devices", "1.5"], "--devices: 1.5 is not allowed: must be a whole number from 1"),
        (["--params", "1e9", "--memory-gib", "0"], "--memory-gib: 0 is not allowed: must be a number from 0.0625"),
        (["--params", "1e9", "--memory-gib", "nan"], '--memory-gib: "nan" is not allowed: must be a number from'),
        (["--params", "1e9", "--sequence-tokens", "1"], "--sequence-tokens: 1 is not allowed: must be a whole number"),
        (["--params", "1e9", "--lora-rank", "0"], "--lora-rank: 0 is not allowed: must be a whole number from 1 to"),
        (["--params", "1e9", "--set", "seed=1"], '--set: "seed=1" is not allowed: must be given with a CONFIG'),
        (["configs/tiny.yaml", "--sequence-tokens", "9"], "--sequence-tokens: 9 is not allowed: must be given with"),
        (["configs/absent.yaml"], "configs/absent.yaml: no such file"),
        (["configs/tiny.yaml", "--set", "sft.stepps=3"], "sft.stepps: unknown field (did you mean steps?)"),
        (["configs/tiny.yaml", "--set", "ppo.stages.0.lr=-1"], "ppo.stages.0.lr: -1 is not allowed: must be greater"),
        (["configs/smollm2.yaml", "--set", "base.model=./absent"], "base.model: './absent' is not a directory"),
        (["configs/smollm2.yaml", "--set", "base.trainable_layers=31"], "base.trainable_layers: 31 is not allowed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    outcome = xray_plan(*arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith(f"error: {message}")
    assert len(outcome.stderr.strip().splitlines()) == 1


def test_planning_loads_no_engine() -> None:
    heavy = {"torch", "ray", "prefect", "deepspeed", "vllm", "transformers"}
    code = (
        "import sys, xray_runtime.planning.suggestions as s, xray_runtime.planning.workload as w\n"
        "list(s.suggest(w.from_parameters(7e9, 1024), w.Machine(num_devices=1, memory_bytes=2**33)))\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_plans_are_values() -> None:
    plan = make_plan(from_parameters(1e9, 1024), machine(8))
    assert isinstance(plan, Plan)
    assert hash(plan) == hash(make_plan(from_parameters(1e9, 1024), machine(8)))
