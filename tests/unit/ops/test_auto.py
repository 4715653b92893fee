"""`runtime.parallel: auto`: what a sensible person would choose, recorded, and the same every time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.message_texts import Messages
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.cluster.pool.machine import GIB, Machine
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.kernel.config.paths import section
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.graph import StageCall
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.methods.loading import load_config, validate
from xray_runtime.ops.planner import splits
from xray_runtime.ops.planner.auto import choose, choose_layouts, plan_call, with_layouts
from xray_runtime.ops.planner.plan import Plan
from xray_runtime.ops.planner.stage_workload import stage_workload
from xray_runtime.ops.planner.workload import Workload, from_parameters

ROOT = Path(__file__).parents[3]
LAPTOP = Machine(num_devices=1, memory_bytes=16 * GIB, device="cpu")
SEVEN = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32, "intermediate_size": 11008}
"""6.6 billion parameters with 2,048 tokens."""


def short(parts: dict[str, Any]) -> dict[str, Any]:
    """With prompts and replies of at most 32 tokens, whatever the model's context."""
    return {"data": {"max_prompt_tokens": 32}, **parts, "sft": {"max_response_tokens": 32, **parts.get("sft", {})}}


def gpus(count: int, gib: int = 80, node: int | None = None) -> Machine:
    return Machine(num_devices=count, memory_bytes=gib * GIB, devices_per_node=node)


SINGLE: dict[str, Any] = {"precision": "float32"}
"""The arithmetic of these tests is float32's, with weights sent through host memory."""
HOST = {"parallel": "auto", "weight_transfer": "plasma"}


def auto(base: dict[str, Any] | None = None, **stage: Any) -> LifecycleConfig:
    base = {"kind": "fresh", **(base or {})}
    parts = {"base": base, "sft": {"engine": SINGLE}, "reward": {"engine": SINGLE}, "frozen": SINGLE}
    return validate(short({**parts, "ppo": {"stages": [{"engine": SINGLE, **stage}]}, "runtime": HOST}))


def planned(config: LifecycleConfig, machine: Machine, stage: str = "ppo-1") -> tuple[StageCall, Plan]:
    """A stage with the layouts chosen for it, and the plan behind them."""
    call = recorded_graph(config).calls[stage]
    plan = plan_call(call, machine)
    assert plan is not None
    chosen, _ = choose_layouts(call, machine)
    return chosen, plan


def described(config: LifecycleConfig, machine: Machine, nodes: list[dict[str, float]] | None = None) -> str:
    _, text = choose_layouts(recorded_graph(config).calls["ppo-1"], machine, nodes)
    assert text is not None
    return text


def engines(call: StageCall) -> list[Any]:
    return [role.layout for role in call.kind.models(call.config).values() if role.use == "trained"]


def layouts(call: StageCall) -> set[tuple[int, int]]:
    return {(engine.num_workhorses, engine.sharding_level) for engine in engines(call)}


def ppo_workload(config: LifecycleConfig) -> Workload:
    workload = stage_workload(recorded_graph(config).calls["ppo-1"], "cuda")
    assert workload is not None
    return workload


# The model and the data of `custom.yaml` are the reader's; these others write their layouts.
PRESETS = sorted(
    path for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith(("custom", "long", "moe", "gpu-"))
)


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_on_a_laptop_every_config_of_ours_stays_as_it_is(path: Path) -> None:
    """All cores serve the threads of one Workhorse: a second rank would only add communication."""
    for call in recorded_graph(load_config(path, ["runtime.parallel=auto"])).calls.values():
        chosen, text = choose_layouts(call, LAPTOP)
        roles = call.kind.models(call.config).values()
        data = chosen.config.model_dump()
        for role in roles:
            if isinstance(role.layout, EngineConfig):
                assert section(data, role.field)["zero_stage"] == role.layout.least_sharding_level
                section(data, role.field)["zero_stage"] = role.layout.zero_stage
        assert data == call.config.model_dump()
        assert (text is None) == (not roles)
        if text is not None:
            assert text.startswith(f"{call.name}: runtime.parallel: auto chooses colocated")
            assert chosen.runtime.parallel == "as_written"


SMOLLM2_360M = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(("count", "gib"), [(1, 24), (3, 24), (8, 24), (1, 80), (6, 80), (8, 80)])
def test_the_template_runs_on_one_gpu_and_on_eight(count: int, gib: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_360M))
    template = load_config(ROOT / "configs/custom.yaml", [f"base.model={tmp_path}"])
    for call in recorded_graph(template).calls.values():
        assert (choose_layouts(call, gpus(count, gib))[1] is None) == (not call.kind.models(call.config))
    _, plan = planned(template, gpus(count, gib))
    assert plan.placement == "colocated"
    assert {p.layout.num_devices for p in plan.roles} == {count}


def test_more_ranks_are_not_taken_than_a_step_has_micro_batches() -> None:
    # 32 sequences of 48 tokens are one micro-batch of 4,096; of 512 they are three.
    there = Machine(num_devices=32, memory_bytes=8 * GIB, device="cpu")
    assert layouts(planned(auto(), there)[0]) == {(1, 0)}
    small = {"engine": {"micro_batch_tokens": 512}}
    parts = {"sft": small, "reward": small, "ppo": {"stages": [small]}, "runtime": {"parallel": "auto"}}
    config = validate(short(parts))
    assert layouts(planned(config, there)[0]) == {(3, 0)}
    # Replies of SFT are longer, and its steps twice as large: 64 × (32 + 32) = 4,096 tokens.
    assert layouts(planned(config, there, "sft")[0]) == {(8, 0)}


def large(micro_batch_tokens: int, **stage: Any) -> LifecycleConfig:
    engine = {"engine": {**SINGLE, "micro_batch_tokens": micro_batch_tokens}}
    base = {"kind": "fresh", **SEVEN}
    stages = [engine | {"max_new_tokens": 32} | stage]
    parts = {"base": base, "sft": engine, "reward": engine, "ppo": {"stages": stages}, "frozen": SINGLE}
    return validate(short({**parts, "runtime": HOST}))


def test_a_model_too_large_for_one_gpu_is_spread_over_all() -> None:
    """6.5 × 10⁹ parameters, float32, 77.3 usable GB; a step of 2,048 tokens has four micro-batches of 512.

    TP 2 holds 3.25 × 10⁹ parameters a rank: ZeRO-2 over four replicas (4 + (4 + 12) / 4) = 8 bytes of each, 26.0 GB.
    Whole replicas under ZeRO-3 over eight would hold 13, and gather 26 GB twice for each of their passes.
    """
    chosen, plan = planned(large(512), gpus(8))
    assert plan.placement == "colocated"
    assert replica(chosen) == (2, 1, 4, 2)
    [policy] = [p.memory for p in plan.roles if p.role.name == "policy"]
    assert (policy.weights + policy.gradients + policy.optimizer) / 1e9 == pytest.approx(26.0, rel=0.01)
    # Policy, reference, reward model and generator share each GPU.
    assert chosen.runtime.gpus_per_workhorse == 0.25
    # Passes of all tokens, the default, may be cut: the whole node works on one replica.
    whole, roomy = planned(large(4096), gpus(8))
    assert replica(whole) == (8, 1, 1, 0)
    assert roomy.iteration_s < plan.iteration_s
    # Two trained models share the same sixteen.
    separate, _ = planned(large(4096, critic="separate", critic_engine=SINGLE), gpus(16))
    assert replica(separate) == (8, 1, 2, 2)
    assert separate.config.critic_engine == separate.config.engine
    with pytest.raises(ConfigError, match=r"runtime.parallel: .*: no plan fits; the nearest is "):
        described(large(4096), gpus(1, 24))


def two_rows(base: dict[str, Any], **runtime: Any) -> LifecycleConfig:
    """Steps of two rows, which ZeRO cannot shard over more than two ranks."""
    engine = {"engine": {**SINGLE, "micro_batch_tokens": 512}}
    stages = [engine | {"minibatch_size": 2, "prompts_per_iteration": 8}]
    step = engine | {"batch_size": 2}
    runtime = {**HOST, **runtime}
    return validate(
        {"base": {"kind": "fresh", **base}, "sft": step, "reward": step, "ppo": {"stages": stages}}
        | {"runtime": runtime, "frozen": SINGLE}
    )


def replica(call: StageCall) -> tuple[int, int, int, int]:
    """(TP, PP, DP, ZeRO stage), the same for every trained model."""
    [engine] = set(engines(call))
    return engine.tensor_parallel, engine.pipeline_parallel, engine.data_parallel, engine.sharding_level


@pytest.mark.parametrize(
    ("machine", "layout", "placement"),
    [
        # 6.5 × 10⁹ parameters. TP 4 holds 1.63 × 10⁹ a rank: ZeRO-2 on two replicas (4 + (4 + 12) / 2) = 12 bytes of
        # each, 19.5 GB; ZeRO-3 without TP would hold 52, and two GPUs would work instead of eight.
        (gpus(8), (4, 1, 2, 2), "colocated"),
        # 48 GiB have 46.4 GB for four models: two stages of half the layers, 13.0 GB at 16 bytes a parameter.
        (gpus(8, 48), (4, 2, 1, 0), "colocated"),
        (gpus(8, 40), (4, 2, 1, 0), "colocated"),
        # The same where a node has four GPUs: a stage stays on a node. Where it has two, the generator is split by 2 at
        # most, and a frozen model of 26 GB needs a GPU of its own: four GPUs are left, 26.0 GB on each.
        (gpus(8, 40, node=4), (4, 2, 1, 0), "colocated"),
        (gpus(8, 40, node=2), (2, 2, 1, 0), "separate"),
        # Single GPUs: four stages, 26.0 GB; activations of four micro-batches 5.6, 0.5: 32.1.
        (gpus(8, 40, node=1), (1, 4, 1, 0), "separate"),
    ],
)
def test_models_too_large_for_zero_are_split(
    machine: Machine, layout: tuple[int, int, int, int], placement: str
) -> None:
    chosen, plan = planned(two_rows(SEVEN), machine)
    assert replica(chosen) == layout
    assert plan.placement == placement
    tp, pp, _, _ = layout
    said = (f" TP{tp}" if tp > 1 else "") + (f" PP{pp}" if pp > 1 else "")
    assert f"policy ZeRO-{layout[3]}{said}" in described(two_rows(SEVEN), machine)


def test_heads_and_layers_bound_the_cut() -> None:
    # 43 layers, 35 heads: no power of two divides them, so layers alone are dealt. 6.6 × 10⁹ parameters.
    odd = {"hidden_size": 3360, "num_layers": 43, "num_heads": 35, "num_kv_heads": 35, "intermediate_size": 10752}
    assert replica(planned(two_rows(odd), gpus(8, 40))[0])[:2] == (1, 4)
    # Key-value heads are split too: two of them bound the degree.
    grouped = SEVEN | {"num_kv_heads": 2, "intermediate_size": 13312}
    assert replica(planned(two_rows(grouped), gpus(8, 40))[0])[:2] == (2, 2)
    # Two layers give two stages at most, which 40 GiB do not hold: the optimizer's states leave the GPUs.
    wide = {"hidden_size": 10080, "num_layers": 2, "num_heads": 45, "num_kv_heads": 45, "intermediate_size": 94464}
    _, plan = planned(two_rows(wide), gpus(8, 40))
    assert plan.layouts["frozen"].pp == 2
    assert plan.offloads


def test_a_cut_policy_keeps_to_the_object_store() -> None:
    """Direct transfer sends whole models only: the plan offloads instead of cutting the policy."""
    chosen, plan = planned(two_rows(SEVEN, weight_transfer="nccl"), gpus(8, 40))
    assert replica(chosen) == (1, 1, 2, plan.layouts["trained"].zero_stage)
    assert {engine.offload for engine in engines(chosen)} == {"cpu"}
    cut = {"num_workhorses": 2, "pipeline_parallel": 2}
    with pytest.raises(ConfigError, match=r"engine: .* with runtime\.weight_transfer = 'nccl': only 'plasma'"):
        recorded_graph(
            validate({"ppo": {"stages": [{"engine": cut}]}, "runtime": {"device": "cuda", "weight_transfer": "nccl"}})
        )


def seventy(batch_size: int, micro_batch_tokens: int) -> Workload:
    """70 × 10⁹ parameters trained in mixed precision: 80 layers, hidden 8192, 64 heads, 8 key-value heads."""
    workload = from_parameters(70e9, 1024)
    return replace(workload, roles=workload.roles[:1], batch_size=batch_size, micro_batch_tokens=micro_batch_tokens)


def test_seventy_billion() -> None:
    def chosen(workload: Workload, machine: Machine) -> tuple[int, int, int, int]:
        [role] = choose(workload, machine).roles
        return role.layout.tp, role.layout.pp, role.layout.dp, role.layout.zero_stage

    # 16 × 70 = 1,120 GB of model states: more than 8 × 77.3. Without the optimizer's 840 they fit.
    with pytest.raises(ConfigError, match="no plan fits"):
        chosen(replace(seventy(512, 1024), open_choices=frozenset()), gpus(8))
    assert chosen(seventy(512, 1024), gpus(8)) == (1, 1, 8, 3)
    # ZeRO-3 on 32: 35 GB; gathered 2, bucket 1, activations of 1,024 tokens 31.6, logits 0.3, a process 0.5: 70.4.
    assert chosen(seventy(512, 1024), gpus(32, node=8)) == (1, 1, 32, 3)
    # Steps of eight rows: ZeRO-3 would hold 140 GB a rank. TP 8 within a node and two stages leave a rank 4.5 × 10⁹
    # parameters: ZeRO-1 over two replicas (4 + 12 / 2) × 4.5 = 45 GB.
    assert chosen(seventy(8, 1024), gpus(32, node=8)) == (8, 2, 2, 1)
    # Nodes of four: TP 4 and four stages.
    assert chosen(seventy(8, 1024), gpus(32, node=4)) == (4, 4, 2, 1)


def test_frozen_models_are_split_as_far_as_one_copy_needs() -> None:
    """34.5 × 10⁹ parameters, 138 GB in float32, 69 in bfloat16; one layer's activations and logits are some GB."""
    big = {"hidden_size": 8192, "num_layers": 40, "num_heads": 64, "num_kv_heads": 8, "intermediate_size": 28672}
    written = large(512).model_dump(mode="json") | {"base": {"kind": "fresh", **big, "vocab_size": 32000}}
    chosen, _ = planned(validate(written), gpus(32, node=8))
    # ZeRO-3 holds 4.3 GB on each of 32, and gathers 138 GB once: less than a split by tensor reduces.
    frozen = chosen.config.frozen
    assert (frozen.num_workhorses, frozen.zero_stage, frozen.tensor_parallel) == (32, 3, 1)
    assert (chosen.config.generator.tensor_parallel, chosen.runtime.generator_replicas) == (8, 4)
    assert replica(chosen) == (8, 1, 4, 2)
    assert "reference ZeRO-3 DP32; " in described(validate(written), gpus(32, node=8))
    # 38.7 usable GB are too few to share: an eighth of 138 fits alone, a quarter does not.
    chosen, plan = planned(validate(written), gpus(64, 40, node=8))
    assert plan.placement == "separate"
    assert (chosen.config.frozen.num_workhorses, chosen.config.frozen.tensor_parallel) == (8, 8)
    assert replica(chosen) == (8, 4, 1, 0)


LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("precision", "frozen_gb"),
    [
        # 4 bytes of each of 70.6 × 10⁹ parameters are 282 GB, over 64 GPUs; 2 bytes half of that.
        pytest.param("float32", 282.2 / 64, marks=pytest.mark.long),
        ("bfloat16", 141.1 / 64),
    ],
)
def test_a_llama_of_seventy_billion_with_its_reference_and_reward_model(
    tmp_path: Path, precision: str, frozen_gb: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    engine = {"engine": {"precision": "bfloat16"}, "batch_size": 128}
    config = validate(
        {
            "base": {"kind": "pretrained", "model": str(tmp_path)},
            "data": {"max_prompt_tokens": 1024},
            "sft": engine,
            "reward": engine,
            "ppo": {
                "stages": [
                    {
                        "engine": engine["engine"],
                        "prompts_per_iteration": 512,
                        "minibatch_size": 128,
                        "max_new_tokens": 1024,
                    }
                ]
            },
            "frozen": {"precision": precision},
            "runtime": {"parallel": "auto"},
        }
    )
    chosen, plan = planned(config, gpus(64, node=8))
    assert (chosen.config.frozen.zero_stage, chosen.config.frozen.precision) == (3, precision)
    # All 64 GPUs train, score and, as eight replicas over eight each, generate while the others' passes are over.
    assert layouts(chosen) == {(64, 3)}
    assert (chosen.config.generator.tensor_parallel, chosen.runtime.generator_replicas) == (8, 8)
    assert chosen.runtime.generator_sleeps
    assert chosen.runtime.max_num_seqs == plan.workload.running_sequences(plan.layouts["sampled"])
    memory = {p.role.name: p.memory for p in plan.roles}
    for name in ("reference", "rewards.0"):
        assert memory[name].weights / 1e9 == pytest.approx(frozen_gb, rel=0.01)
    # Loading takes a fraction of the float32 model: no rank ever has it.
    assert all(m.weights + m.loading < 0.2 * 282e9 for m in memory.values())


def test_models_that_cannot_be_split_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """34.5 × 10⁹ parameters in float32: 138 GB over all devices, and 4 GB of gathered parameters on each. A sync has
    the generator's 69 in bfloat16 beside the policy's states on 32 of them, 17, and what DeepSpeed keeps, 6."""
    monkeypatch.setattr(splits, "_can_split", lambda library, model: (False, False))
    big = {"hidden_size": 8192, "num_layers": 40, "num_heads": 64, "num_kv_heads": 8, "intermediate_size": 28672}
    written = large(512).model_dump(mode="json") | {"base": {"kind": "fresh", **big, "vocab_size": 32000}}
    call = recorded_graph(validate(written)).calls["ppo-1"]
    chosen, text = choose_layouts(call, gpus(64, 110, node=8))
    frozen = chosen.config.frozen
    assert (frozen.num_workhorses, frozen.zero_stage, frozen.tensor_parallel) == (64, 3, 1)
    assert "reference ZeRO-3 DP64" in str(text)


def test_a_frozen_trunk_is_not_cut() -> None:
    workload = ppo_workload(two_rows(SEVEN))
    [policy] = workload.of_use("trained")
    others = [role for role in workload.roles if role.name not in ("policy", "reference")]
    policy = replace(policy, top_layers=16, branches=1)
    whole = replace(workload, roles=(policy, *others), batch_size=2, open_choices=frozenset())
    with pytest.raises(ConfigError, match="no plan fits"):
        choose(whole, gpus(8, 32))


def test_small_models_share_gpus() -> None:
    chosen, _ = planned(auto(), gpus(1))
    assert layouts(chosen) == {(1, 0)}
    # Policy, reference, reward model and generator on one GPU; vLLM gets what it needs of it.
    assert chosen.runtime.gpus_per_workhorse == 0.25
    assert 0.01 <= chosen.runtime.gpu_memory_fraction <= 0.1
    # 64 replies in a rollout: the cache and the sampler's logits are planned for so many.
    assert chosen.runtime.max_num_seqs == 64
    assert planned(auto(), gpus(2))[0].runtime.gpus_per_workhorse == 0.25
    # What is alone in its stage has a GPU to itself, so no other stage meets it there.
    assert planned(auto(), gpus(1), "sft")[0].runtime.gpus_per_workhorse == 1.0
    assert planned(auto(), gpus(1), "preferences")[0].runtime.gpu_memory_fraction == 0.9


def test_a_chosen_layout_equals_one_written_by_hand() -> None:
    chosen, plan = planned(auto(SEVEN), gpus(8))
    again = planned(auto(SEVEN), gpus(8))[0], with_layouts(recorded_graph(auto(SEVEN)).calls["ppo-1"], plan)
    assert [(call.config, call.runtime) for call in again] == [(chosen.config, chosen.runtime)] * 2
    assert chosen.runtime.parallel == "as_written"
    engine = {**SINGLE, "num_workhorses": 8, "zero_stage": 0, "tensor_parallel": 8, "micro_batch_tokens": 1536}
    layouts = {"frozen": {**SINGLE, "num_workhorses": 8, "zero_stage": 3}}
    by_hand = validate(short({"base": {"kind": "fresh", **SEVEN}, "ppo": {"stages": [{"engine": engine}]}, **layouts}))
    assert chosen.config == recorded_graph(by_hand).calls["ppo-1"].config


def test_activations_are_computed_again_where_nothing_else_fits() -> None:
    """One GPU, 10⁹ parameters: states of 16 GB, frozen models of 4 each. A pass of 16,384 tokens keeps 16,384 × 180,296
    bytes a layer, 59 GB in all; computed again, 16,384 × 4 × 2,048, 2.7 GB, and one layer's 3.0.
    """
    sizes = {"hidden_size": 2048, "num_layers": 20, "num_heads": 16, "num_kv_heads": 16, "intermediate_size": 5632}
    engine = {"engine": {**SINGLE, "micro_batch_tokens": 16_384}}
    stages = {"sft": engine, "reward": engine, "ppo": {"stages": [engine]}, "frozen": SINGLE}
    config = validate({"base": {"kind": "fresh", **sizes}, **stages, "runtime": HOST})
    chosen, _ = planned(config, gpus(1))
    assert {engine.activation_checkpointing for engine in engines(chosen)} == {True}
    assert "policy ZeRO-0 recompute" in described(config, gpus(1))
    roomy, _ = planned(config, gpus(1, 141))
    assert {engine.activation_checkpointing for engine in engines(roomy)} == {False}


def test_other_engine_fields_are_kept() -> None:
    """ZeRO 0 can neither train in bfloat16 nor offload: the lowest stage that can is taken, also for one Workhorse."""
    mixed = {"engine": {"precision": "bfloat16", "activation_checkpointing": True}, "lora": {"rank": 8}}
    written = {"sft": mixed, "reward": mixed, "ppo": {"stages": [mixed]}, "runtime": {"parallel": "auto"}}
    for stage in ("sft", "reward", "ppo-1"):
        chosen, _ = planned(validate(written), LAPTOP, stage)
        assert layouts(chosen) == {(1, 1)}
        [engine] = engines(chosen)
        assert (engine.precision, engine.activation_checkpointing) == ("bfloat16", True)
        assert chosen.config.lora.rank == 8


def test_each_stage_is_planned_by_what_it_saves_itself() -> None:
    """Six billion parameters on four GPUs: both use all four; only SFT has states of all weights to shard."""
    plain = {"engine": {**SINGLE, "micro_batch_tokens": 512}}
    lora = {"lora": {"rank": 8}, **plain}
    base = {"kind": "fresh", **SEVEN}
    stages = {"sft": plain, "reward": lora, "ppo": {"stages": [lora]}, "frozen": SINGLE}
    config = validate(short({"base": base, **stages, "runtime": HOST}))
    ppo, sft = planned(config, gpus(4)), planned(config, gpus(4), "sft")
    # Without a second model for the reference, weights and gradients need not be sharded.
    assert (layouts(ppo[0]), layouts(sft[0])) == ({(4, 1)}, {(4, 2)})
    states = [next(p.memory for p in plan.roles if p.role.use == "trained") for _, plan in (ppo, sft)]
    # 20 million parameters of adapters, and 6.5 billion: 12 bytes each over four.
    assert [round(memory.optimizer / 1e9, 1) for memory in states] == [0.1, 19.5]


@pytest.mark.parametrize(
    "written",
    [
        {"sft": {"engine": {"zero_stage": 2}}},
        {"frozen": {"num_workhorses": 2}},
        {"ppo": {"stages": [{"critic": "separate", "critic_engine": {"num_workhorses": 2, "pipeline_parallel": 2}}]}},
    ],
)
def test_a_layout_beside_auto_is_refused(written: dict[str, Any], message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        recorded_graph(validate(written | {"runtime": {"parallel": "auto"}}))


@pytest.mark.parametrize(
    ("field", "value"), [("gpus_per_workhorse", 0.7), ("gpu_memory_fraction", 0.7), ("max_num_seqs", 64)]
)
def test_shares_of_a_gpu_are_chosen_too(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^runtime: {field} = {value} must be left out with parallel = 'auto'"):
        validate({"runtime": {"parallel": "auto", field: value}})
