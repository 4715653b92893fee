"""`runtime.parallel: auto`: what a sensible person would choose, recorded, and the same every time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.config.base import FreshBase, PretrainedBase
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import load_config, validate
from xray_runtime.config.validation import ConfigError
from xray_runtime.planning import plan as planner
from xray_runtime.planning.auto import choose, choose_layouts, describe, section, with_layouts
from xray_runtime.planning.workload import GIB, Machine, Workload, from_config, from_parameters

ROOT = Path(__file__).parents[3]
LAPTOP = Machine(num_devices=1, memory_bytes=16 * GIB, device="cpu")
SEVEN = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32, "intermediate_size": 11008}
"""6.6 billion parameters with 2,048 tokens."""


def short(parts: dict[str, Any]) -> dict[str, Any]:
    """With prompts and replies of at most 32 tokens, whatever the model's context."""
    return {"data": {"max_prompt_tokens": 32}, **parts, "sft": {"max_response_tokens": 32, **parts.get("sft", {})}}


def gpus(count: int, gib: int = 80, node: int | None = None) -> Machine:
    return Machine(num_devices=count, memory_bytes=gib * GIB, devices_per_node=node)


def auto(base: dict[str, Any] | None = None, **stage: Any) -> LifecycleConfig:
    base = {"kind": "fresh", **(base or {})}
    return validate(short({"base": base, "ppo": {"stages": [stage]}, "runtime": {"parallel": "auto"}}))


def layouts(config: LifecycleConfig) -> set[tuple[int, int]]:
    return {(engine.num_workhorses, engine.zero) for engine in config.engines.values()}


# The model and the data of `custom.yaml` are the reader's.
PRESETS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "custom")


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_on_a_laptop_every_config_of_ours_stays_as_it_is(path: Path) -> None:
    """All cores serve the threads of one Workhorse: a second rank would only add communication."""
    chosen, plan = choose_layouts(load_config(path, ["runtime.parallel=auto"]), LAPTOP)
    written = load_config(path)
    [least] = {engine.zero for engine in written.engines.values()}
    assert layouts(chosen) == {(1, least)}
    data = written.model_dump()
    for name in written.engines:
        section(data, name)["zero_stage"] = least
    assert chosen == validate(data)
    assert plan.placement == "colocated"
    assert describe(plan).startswith(
        f"runtime.parallel: auto takes colocated, trained models on 1 Workhorses under ZeRO-{least}"
    )


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


@pytest.mark.parametrize("gib", [24, 80])
@pytest.mark.parametrize("count", range(1, 9))
def test_the_template_runs_on_one_gpu_and_on_eight(count: int, gib: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_360M))
    template = load_config(ROOT / "configs/custom.yaml", [f"base.model={tmp_path}"])
    _, plan = choose_layouts(template, gpus(count, gib))
    assert plan.placement == ("colocated" if count < 5 else "separate")


def test_more_ranks_are_not_taken_than_a_step_has_micro_batches() -> None:
    # 32 sequences of 48 tokens are one micro-batch of 4,096; of 512 they are three.
    assert layouts(choose_layouts(auto(), Machine(num_devices=32, memory_bytes=8 * GIB, device="cpu"))[0]) == {(1, 0)}
    small = {"engine": {"micro_batch_tokens": 512}}
    parts = {"sft": small, "reward": small, "ppo": {"stages": [small]}, "runtime": {"parallel": "auto"}}
    config = validate(short(parts))
    # The replies of SFT are the longest: 32 × (32 + 32) = 2,048 tokens.
    assert layouts(choose_layouts(config, Machine(num_devices=32, memory_bytes=8 * GIB, device="cpu"))[0]) == {(4, 0)}


def large(micro_batch_tokens: int, **stage: Any) -> LifecycleConfig:
    engine = {"engine": {"micro_batch_tokens": micro_batch_tokens}}
    base = {"kind": "fresh", **SEVEN}
    stages = [engine | stage]
    parts = {"base": base, "sft": engine, "reward": engine, "ppo": {"stages": stages}, "runtime": {"parallel": "auto"}}
    return validate(short(parts))


def test_a_model_too_large_for_one_gpu_is_sharded_beside_the_others() -> None:
    """6.5 × 10⁹ parameters, float32, 77.3 usable GB; a step of 2,048 tokens has four micro-batches of 512.

    On four GPUs ZeRO-1 needs 8 + 12 / 4 = 11 bytes a parameter, 71 GB, and some 8 GB for bucket and passes; ZeRO-2
    4 + 16 / 4 = 8 bytes, 52 GB.
    """
    chosen, plan = choose_layouts(large(512), gpus(8))
    assert plan.placement == "separate"
    assert layouts(chosen) == {(4, 2)}
    assert chosen.runtime.gpus_per_workhorse == 1.0
    # With all tokens in one pass, one rank would be of use. Activations are 41 GB more, too much for ZeRO-3 on all five
    # that reference, reward model and generator leave: two pairs share each layer.
    whole, _ = choose_layouts(large(4096), gpus(8))
    assert layouts(whole) == {(4, 2)}
    assert {engine.tensor_parallel for engine in whole.engines.values()} == {2}
    # Two trained models share 13 GPUs, six each.
    separate, _ = choose_layouts(large(4096, critic="separate", critic_engine={"micro_batch_tokens": 4096}), gpus(16))
    assert layouts(separate) == {(6, 3)}
    assert separate.ppo.stages[0].critic_engine == separate.ppo.stages[0].engine
    with pytest.raises(ConfigError, match=r"runtime.parallel: .*: nothing fits; the nearest is "):
        choose_layouts(large(4096), gpus(4, 40))


def two_rows(base: dict[str, Any], **runtime: Any) -> LifecycleConfig:
    """Steps of two rows, which ZeRO cannot shard over more than two ranks."""
    engine = {"engine": {"micro_batch_tokens": 512}}
    stages = [engine | {"minibatch_size": 2, "prompts_per_iteration": 8}]
    step = engine | {"batch_size": 2}
    runtime = {"parallel": "auto", **runtime}
    return validate(
        {"base": {"kind": "fresh", **base}, "sft": step, "reward": step, "ppo": {"stages": stages}}
        | {"runtime": runtime}
    )


def replica(config: LifecycleConfig) -> tuple[int, int, int, int]:
    """(TP, PP, DP, ZeRO stage), the same for every trained model."""
    [engine] = set(config.engines.values())
    return engine.tensor_parallel, engine.pipeline_parallel, engine.data_parallel, engine.zero


@pytest.mark.parametrize(
    ("machine", "layout"),
    [
        # 6.5 × 10⁹ parameters. ZeRO-3 on two ranks: 16 / 2 = 8 bytes a parameter, 52 GB; gathered weights 4, the bucket
        # 2, activations of 512 tokens 5.6, a process 0.5: 64.0 GB. 80 GiB have 77.3 usable GB.
        (gpus(8), (1, 1, 2, 3)),
        # 48 GiB have 46.4. TP 2 holds 3.25 × 10⁹ a rank: ZeRO-2 on two replicas 4 + (4 + 12) / 2 = 12 bytes, 39.0 GB;
        # bucket 2, activations 3.6, process 0.5: 45.1. Of four pairs of GPUs, two are left to the other three models.
        (gpus(8, 48), (2, 1, 2, 2)),
        # 40 GiB have 38.7. TP 4: 1.63 × 10⁹ parameters at 16 bytes, 26.1 GB; 2.6 and 0.5: 29.2. Another four are not
        # free.
        (gpus(8, 40), (4, 1, 1, 0)),
        # The same where a node has four GPUs; where it has two, a replica goes over two nodes in two stages: half the
        # layers split in two, 26.0 GB; but activations of two micro-batches under way, 3.6, and 0.5: 30.2.
        (gpus(8, 40, node=4), (4, 1, 1, 0)),
        (gpus(8, 40, node=2), (2, 2, 1, 0)),
        # Single GPUs: four stages, 26.0 GB; activations of four micro-batches 5.6, 0.5: 32.1.
        (gpus(8, 40, node=1), (1, 4, 1, 0)),
    ],
)
def test_what_zero_cannot_shard_is_cut(machine: Machine, layout: tuple[int, int, int, int]) -> None:
    chosen, plan = choose_layouts(two_rows(SEVEN), machine)
    assert replica(chosen) == layout
    assert plan.placement == "separate"
    tp, pp, _, _ = layout
    said = (f", TP {tp}" if tp > 1 else "") + (f", PP {pp}" if pp > 1 else "")
    assert f"under ZeRO-{layout[3]}{said}: " in describe(plan)


def test_heads_and_layers_bound_the_cut() -> None:
    # 43 layers, 35 heads: no power of two divides them, so layers alone are dealt. 6.6 × 10⁹ parameters.
    odd = {"hidden_size": 3360, "num_layers": 43, "num_heads": 35, "num_kv_heads": 35, "intermediate_size": 10752}
    assert replica(choose_layouts(two_rows(odd), gpus(8, 40))[0])[:2] == (1, 4)
    # Key-value heads are split too: two of them bound the degree.
    grouped = SEVEN | {"num_kv_heads": 2, "intermediate_size": 13312}
    assert replica(choose_layouts(two_rows(grouped), gpus(8, 40))[0])[:2] == (2, 2)
    # Two layers give two stages at most.
    wide = {"hidden_size": 10080, "num_layers": 2, "num_heads": 45, "num_kv_heads": 45, "intermediate_size": 94464}
    with pytest.raises(ConfigError, match="PP 2"):
        choose_layouts(two_rows(wide), gpus(8, 40))


def test_a_cut_policy_keeps_to_the_object_store() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.weight_transfer = 'auto' must be 'plasma'"):
        choose_layouts(two_rows(SEVEN, weight_transfer="auto"), gpus(8, 40))


def seventy(batch_size: int, micro_batch_tokens: int) -> Workload:
    """70 × 10⁹ parameters trained in mixed precision: 80 layers, hidden 8192, 64 heads, 8 key-value heads."""
    workload = from_parameters(70e9, 1024)
    return replace(workload, roles=workload.roles[:1], batch_size=batch_size, micro_batch_tokens=micro_batch_tokens)


def test_seventy_billion() -> None:
    def chosen(workload: Workload, machine: Machine) -> tuple[int, int, int, int]:
        [role] = choose(workload, machine, FreshBase()).roles
        return role.layout.tp, role.layout.pp, role.layout.dp, role.layout.zero_stage

    # 16 × 70 = 1,120 GB of model states: more than 8 × 77.3.
    with pytest.raises(ConfigError, match="nothing fits"):
        chosen(seventy(512, 1024), gpus(8))
    # ZeRO-3 on 32: 35 GB; gathered 2, bucket 1, activations of 1,024 tokens 31.6, logits 0.3, a process 0.5: 70.4.
    assert chosen(seventy(512, 1024), gpus(32, node=8)) == (1, 1, 32, 3)
    # Steps of eight rows: ZeRO-3 would hold 140 GB a rank. TP 8 within a node leaves a rank 9.27 × 10⁹ parameters: with
    # ZeRO-1 over four replicas (4 + 12 / 4) × 9.27 = 64.9, bucket 1, activations 14.6, 0.8: 81.3, too much; with ZeRO-2
    # (2 + (2 + 12) / 4) × 9.27 = 51.0: 67.3.
    assert chosen(seventy(8, 1024), gpus(32, node=8)) == (8, 1, 4, 2)
    # Nodes of four: TP 4 on eight replicas holds (2 + 14 / 8) × 17.9 = 67.3, bucket 1, activations 17.0, 0.8: 86.1. So
    # two stages, over two nodes: (2 + 14 / 4) × 8.97 = 49.4: 68.1.
    assert chosen(seventy(8, 1024), gpus(32, node=4)) == (4, 2, 4, 2)


def test_what_is_frozen_is_cut_as_far_as_one_copy_needs_it() -> None:
    """34.5 × 10⁹ parameters, 138 GB in float32, 69 in bfloat16; one layer's activations and logits are some GB."""
    big = {"hidden_size": 8192, "num_layers": 40, "num_heads": 64, "num_kv_heads": 8, "intermediate_size": 28672}
    written = large(512).model_dump(mode="json") | {"base": {"kind": "fresh", **big, "vocab_size": 32000}}
    chosen, plan = choose_layouts(validate(written), gpus(32, node=8))
    assert (chosen.frozen.num_workhorses, chosen.frozen.tensor_parallel, chosen.generator.tensor_parallel) == (2, 2, 1)
    # 32 less 2 for the reference, 2 for the reward model, 1 for the generator.
    assert layouts(chosen) == {(27, 3)}
    assert "27 Workhorses under ZeRO-3; frozen ones on 2, TP 2: " in describe(plan)
    # 38.7 usable GB: an eighth of 138 fits, a quarter of 69, and ZeRO-3 does not reach.
    chosen, plan = choose_layouts(validate(written), gpus(64, 40, node=8))
    assert (chosen.frozen.tensor_parallel, chosen.generator.tensor_parallel) == (8, 4)
    # 64 less 20 are 5 nodes of eight and a half: two replicas of two stages over eight.
    assert replica(chosen) == (8, 2, 2, 2)


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
    ("precision", "degree", "frozen_gb", "trained_on"),
    [
        # 4 bytes of each of 70.6 × 10⁹ parameters are 282 GB: of the layers an eighth, of both embeddings 8.4.
        ("float32", 8, 8.4 + (282.2 - 8.4) / 8, 44),
        # 2 bytes: half, and a quarter of the layers; 64 devices less 3 × 4.
        ("bfloat16", 4, 4.2 + (141.1 - 4.2) / 4, 52),
    ],
)
def test_a_llama_of_seventy_billion_with_its_reference_and_reward_model(
    tmp_path: Path, precision: str, degree: int, frozen_gb: float, trained_on: int
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
    plan = choose(from_config(config, "cuda"), gpus(64, node=8), FreshBase())
    chosen = with_layouts(config, plan)
    assert (chosen.frozen.tensor_parallel, chosen.frozen.precision) == (degree, precision)
    assert layouts(chosen) == {(trained_on, 3)}
    memory = {p.role.name: p.memory for p in plan.roles}
    for name in ("reference", "reward"):
        assert memory[name].weights / 1e9 == pytest.approx(frozen_gb, rel=0.01)
    # Loading takes a fraction of the float32 model: no rank ever has it.
    assert all(m.weights + m.loading < 0.2 * 282e9 for m in memory.values())


def test_what_cannot_be_cut_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """34.5 × 10⁹ parameters in float32: 138 GB over two devices, and 8 GB of gathered parameters on each."""
    monkeypatch.setattr(planner, "_can_shard", lambda model: (False, False))
    big = {"hidden_size": 8192, "num_layers": 40, "num_heads": 64, "num_kv_heads": 8, "intermediate_size": 28672}
    written = large(512).model_dump(mode="json") | {"base": {"kind": "fresh", **big, "vocab_size": 32000}}
    config = validate(written)
    plan = choose(from_config(config, "cuda"), gpus(64, node=8), PretrainedBase(model="x"))
    chosen = with_layouts(config, plan)
    assert (chosen.frozen.num_workhorses, chosen.frozen.zero_stage, chosen.frozen.tensor_parallel) == (4, 3, 1)
    assert "frozen ones on 4, ZeRO-3: " in describe(plan)


def test_a_frozen_trunk_is_not_cut() -> None:
    base = PretrainedBase(model="x", trainable_layers=16)
    workload = from_config(two_rows(SEVEN), "cuda")
    policy = replace(workload.roles[0], top_layers=16, branches=1)
    others = [role for role in workload.roles[1:] if role.name != "reference"]
    with pytest.raises(ConfigError, match="nothing fits"):
        choose(replace(workload, roles=(policy, *others), batch_size=2), gpus(8, 32), base)


def test_small_models_share_gpus() -> None:
    chosen, _ = choose_layouts(auto(), gpus(1))
    assert layouts(chosen) == {(1, 0)}
    # Policy, reference, reward model and generator on one GPU; vLLM gets what it needs of it.
    assert chosen.runtime.gpus_per_workhorse == 0.25
    assert 0.01 <= chosen.runtime.gpu_memory_fraction <= 0.1
    assert choose_layouts(auto(), gpus(2))[0].runtime.gpus_per_workhorse == 0.5


def test_what_was_chosen_is_as_if_written_by_hand() -> None:
    chosen, _ = choose_layouts(auto(SEVEN), gpus(8))
    assert chosen == choose_layouts(auto(SEVEN), gpus(8))[0]
    assert chosen.runtime.parallel == "as_written"
    engine = {"engine": {"num_workhorses": 4, "zero_stage": 2, "tensor_parallel": 2}}
    base = {"kind": "fresh", **SEVEN}
    by_hand = validate(short({"base": base, "sft": engine, "reward": engine, "ppo": {"stages": [engine]}}))
    graphs = recorded_graph(chosen), recorded_graph(by_hand)
    assert [call.config for call in graphs[0].calls.values()] == [call.config for call in graphs[1].calls.values()]


def test_activations_are_computed_again_where_nothing_else_fits() -> None:
    """One GPU, 10⁹ parameters: states of 16 GB, frozen models of 4 each. A pass of 16,384 tokens keeps 16,384 × 180,296
    bytes a layer, 59 GB in all; computed again, 16,384 × 4 × 2,048, 2.7 GB, and one layer's 3.0.
    """
    sizes = {"hidden_size": 2048, "num_layers": 20, "num_heads": 16, "num_kv_heads": 16, "intermediate_size": 5632}
    engine = {"engine": {"micro_batch_tokens": 16_384}}
    stages = {"sft": engine, "reward": engine, "ppo": {"stages": [engine]}}
    config = validate({"base": {"kind": "fresh", **sizes}, **stages, "runtime": {"parallel": "auto"}})
    chosen, plan = choose_layouts(config, gpus(1))
    assert {engine.activation_checkpointing for engine in chosen.engines.values()} == {True}
    assert "under ZeRO-0, recomputing: " in describe(plan)
    roomy, _ = choose_layouts(config, gpus(1, 141))
    assert {engine.activation_checkpointing for engine in roomy.engines.values()} == {False}


def test_what_else_an_engine_says_is_kept() -> None:
    """ZeRO 0 can neither train in bfloat16 nor offload: the lowest stage that can is taken, also for one Workhorse."""
    mixed = {"engine": {"precision": "bfloat16", "activation_checkpointing": True}, "lora": {"rank": 8}}
    written = {"sft": mixed, "reward": mixed, "ppo": {"stages": [mixed]}, "runtime": {"parallel": "auto"}}
    chosen, _ = choose_layouts(validate(written), LAPTOP)
    assert layouts(chosen) == {(1, 1)}
    for trained in chosen.trained.values():
        assert (trained.engine.precision, trained.engine.activation_checkpointing) == ("bfloat16", True)
        assert trained.lora is not None
        assert trained.lora.rank == 8


def test_what_one_stage_saves_is_not_counted_where_another_does_not() -> None:
    """Six billion parameters on four GPUs: adapters in every stage fit as whole models, or not at all."""
    lora = {"lora": {"rank": 8}, "engine": {"micro_batch_tokens": 512}}
    plain = {"engine": {"micro_batch_tokens": 512}}

    def config(sft: dict[str, Any]) -> LifecycleConfig:
        base = {"kind": "fresh", **SEVEN}
        return validate(
            {"base": base, "sft": sft, "reward": lora, "ppo": {"stages": [lora]}, "runtime": {"parallel": "auto"}}
        )

    assert layouts(choose_layouts(config(lora), gpus(4))[0]) == {(1, 0)}
    with pytest.raises(ConfigError, match="nothing fits"):
        choose_layouts(config(plain), gpus(4))


def test_what_is_chosen_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sft\.engine\.zero_stage = 2 must be left out with runtime"):
        validate({"sft": {"engine": {"zero_stage": 2}}, "runtime": {"parallel": "auto"}})
    stage = {"critic": "separate", "critic_engine": {"num_workhorses": 2, "pipeline_parallel": 2}}
    with pytest.raises(ConfigError, match=r"frozen\.num_workhorses = 2 must be left out with runtime"):
        validate({"frozen": {"num_workhorses": 2}, "runtime": {"parallel": "auto"}})
    with pytest.raises(ConfigError, match=r"ppo\.stages\.0\.critic_engine\.num_workhorses = 2 must be left out"):
        validate({"ppo": {"stages": [stage]}, "runtime": {"parallel": "auto"}})
