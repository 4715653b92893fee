"""The planner: properties, placements, what a config accepts, and changes that help where no plan fits."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.unit.ops.recount import recounted
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.cluster.pool.demand import check_call
from xray_runtime.cluster.pool.machine import GIB, Machine
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.methods.loading import validate
from xray_runtime.ops.planner.auto import UNCHANGED, Changes, GraphPlan, choose_layouts, plan, plan_call, with_layouts
from xray_runtime.ops.planner.description import as_dict
from xray_runtime.ops.planner.memory import PROCESS_BYTES, Layout, Memory, kv_cache_bytes
from xray_runtime.ops.planner.plan import Plan, most_row_tokens, plan_of
from xray_runtime.ops.planner.search import search
from xray_runtime.ops.planner.stage_workload import stage_workload
from xray_runtime.ops.planner.suggestions import Suggestion, suggest
from xray_runtime.ops.planner.workload import Workload, from_parameters

ROOT = Path(__file__).parents[3]


def machine(num_devices: int, gib: float = 80) -> Machine:
    return Machine(num_devices=num_devices, memory_bytes=int(gib * GIB))


# --- properties

LAYOUTS = st.builds(Layout, zero_stage=st.integers(0, 3), dp=st.integers(2, 512), tp=st.sampled_from([1, 2, 4]))
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
    before, after = few.memory(few.roles[index], layout), many.memory(many.roles[index], layout)
    if few.roles[index].name == "generator":
        # Fewer of them fit into a full cache, so the sampler needs fewer logits at a time.
        before, after = replace(before, logits=0), replace(after, logits=0)
    assert before.total <= after.total


@settings(max_examples=4)
@given(COUNTS, st.integers(1, 64), st.integers(1, 32), st.sampled_from([16, 40, 80]))
def test_a_plan_that_fits_still_fits_on_more(count: float, devices: int, more: int, gib: int) -> None:
    workload = from_parameters(count, 1024)
    if search(workload, machine(devices, gib)).fits:
        assert search(workload, machine(devices + more, gib)).fits
        assert search(workload, machine(devices, gib + more)).fits


@settings(max_examples=8)
@given(COUNTS, st.integers(1, 64), st.sampled_from([4, 24, 80, 141]), st.sampled_from([64, 2048, 32768]))
def test_a_plan_keeps_to_the_machine(count: float, devices: int, gib: int, length: int) -> None:
    workload = from_parameters(count, length)
    plan = search(workload, machine(devices, gib))
    assert plan == search(workload, machine(devices, gib))
    assert [p.role.name for p in plan.roles] == [role.name for role in workload.roles]
    for p in plan.roles:
        assert p.role.use != "trained" or p.layout.dp <= workload.batch_size
        assert p.role.shape.num_heads % p.layout.tp == 0
        assert p.layout.zero_stage < 3 or p.layout.tp * p.layout.pp == 1
    ranks = [p.layout.num_devices for p in plan.roles]
    if plan.placement == "separate":
        assert sum(ranks) <= devices
        assert {len(group.ranks) for group in plan.groups} == {1}
    else:
        assert max(ranks) <= devices
        assert [group.ranks for group in plan.groups] == [plan.roles]
    if plan.fits:
        assert recounted(plan) <= 0.9 * gib * GIB
    assert min(plan.seconds.values()) > 0


# --- what a config accepts

ENGINES: list[dict[str, Any]] = [
    {},
    {"micro_batch_tokens": 256},
    {"precision": "bfloat16", "zero_stage": 1},
    {"offload": "cpu", "zero_stage": 2, "activation_checkpointing": True},
    {"num_workhorses": 2, "library": "megatron"},
    {"num_workhorses": 2, "zero_stage": 3, "micro_batch_tokens": 512},
]
LLAMAS: list[dict[str, Any]] = [
    {},
    {"hidden_size": 2048, "num_heads": 16, "num_kv_heads": 4, "num_layers": 16, "intermediate_size": 5632},
    {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 32, "num_layers": 32, "intermediate_size": 11008},
    {"hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "num_layers": 40, "intermediate_size": 28672},
]


def any_config(chance: random.Random, model: str) -> dict[str, Any]:
    """A config of any shape; not all of them are allowed."""
    layers = chance.choice([None, 2])
    base = chance.choice(
        [{"kind": "pretrained", "model": model, "trainable_layers": layers}]
        + [{"kind": "fresh", **sizes} for sizes in LLAMAS]
    )
    lora = {"lora": {"rank": 8}} if chance.random() < 0.2 else {}
    separate = {"critic": "separate", "critic_engine": chance.choice([None, *ENGINES])}
    rows = chance.choice([2, 32, 256])
    stage = {"engine": chance.choice(ENGINES), "minibatch_size": rows, "prompts_per_iteration": 256} | lora
    reward = {"engine": chance.choice(ENGINES), "batch_size": rows} | lora
    no_reward = {"reward": None, "preferences": None, "reward_ref": "runs/other#reward"}
    runtime = {
        "generator_replicas": chance.choice([1, 1, 2, 5]),
        "cpus_per_workhorse": chance.choice([0.0, 0.2, 1.0, 6.0]),
        "weight_transfer": chance.choice(["plasma", "plasma", "auto"]),
    }
    return {
        "base": base,
        "sft": chance.choice([None, {"batch_size": rows, "engine": {"micro_batch_tokens": 512}} | lora]),
        **chance.choice([{"reward": reward}, no_reward]),
        "ppo": {"stages": [stage, stage | chance.choice([{}, separate])]},
        "generator": {"engine": chance.choice(["vllm", "transformers"])},
        "runtime": runtime,
    }


def any_machine(chance: random.Random) -> Machine:
    device: Any = chance.choice(["cpu", "cuda", "cuda"])
    count = chance.choice([1, 2, 3, 4, 5, 8, 16, 21, 32, 64])
    node = min(chance.choice([1, 2, 4, 8]), count)
    memory = chance.choice([8, 40, 80]) * GIB
    return Machine(num_devices=count, memory_bytes=memory, device=device, devices_per_node=node)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pretrained model of six billion parameters, as far as a planner looks."""
    directory = tmp_path_factory.mktemp("model")
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
    (directory / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "vocab_size": 2048}))
    return str(directory)


def test_proposed_layouts_can_run(model: str) -> None:
    """Whatever is written: the layouts, put into the config, are allowed, and the machine has what they ask for."""
    chance = random.Random(0)
    proposed: Counter[str] = Counter()
    for _ in range(40):
        data, there = any_config(chance, model), any_machine(chance)
        node = there.devices_per_node or there.num_devices
        sizes = [node] * (there.num_devices // node) + [there.num_devices % node]
        gpus = there.device == "cuda"
        nodes = [{"CPU": 8.0 * size, "GPU": float(size) if gpus else 0.0} for size in sizes if size]
        try:
            calls = [UNCHANGED.of_call(call) for call in recorded_graph(validate(data)).calls.values()]
        except ConfigError:
            continue
        for call in calls:
            if not call.kind.models(call.config):
                continue
            try:
                found = plan_call(call, there, nodes)
            except ConfigError:
                proposed["refused"] += 1
                continue
            assert found is not None
            if not found.fits:
                proposed["no plan fits"] += 1
                continue
            chosen = with_layouts(call, found)
            assert chosen.config == call.kind.validated(chosen.config.model_dump(mode="json"))
            assert chosen.runtime.parallel == "as_written"
            check_call(chosen, there.device, nodes)
            proposed[f"{found.kind} on {there.device}"] += 1
    assert {name for name in proposed if name.endswith("on cuda")} >= {
        "colocated on cuda",
        "separate on cuda",
        "colocated, split on cuda",
        "separate, recomputing on cuda",
        "colocated, offloading on cuda",
    }, proposed


def test_each_stage_shares_devices_as_its_models_need(model: str) -> None:
    """A frozen trunk leaves PPO two models and the evaluation four, on each of three GPUs."""
    base = {"kind": "pretrained", "model": model, "trainable_layers": 2}
    calls = recorded_graph(validate({"base": base, "runtime": {"parallel": "auto"}})).calls
    chosen = {name: choose_layouts(calls[name], machine(3, 141))[0] for name in ("ppo-1", "evaluate")}
    assert {name: call.runtime.gpus_per_workhorse for name, call in chosen.items()} == {"ppo-1": 0.5, "evaluate": 0.25}


def test_cores_bound_the_replicas() -> None:
    # A step of 32 × 64 tokens is four passes of 512: four replicas, and three other models, ask for 7 × 8 cores.
    stage = {"engine": {"micro_batch_tokens": 512}, "max_new_tokens": 32}
    there = Machine(num_devices=32, memory_bytes=8 * GIB, device="cpu")

    def chosen(cpus: float) -> int:
        runtime = {"parallel": "auto", "cpus_per_workhorse": cpus}
        config = validate({"data": {"max_prompt_tokens": 32}, "ppo": {"stages": [stage]}, "runtime": runtime})
        call, _ = choose_layouts(recorded_graph(config).calls["ppo-1"], there, [{"CPU": 32.0}])
        engine = call.config.engine
        assert isinstance(engine, EngineConfig)
        return engine.num_workhorses

    assert (chosen(1.0), chosen(8.0)) == (4, 1)
    with pytest.raises(ConfigError, match=r"its models need 63 CPUs .* and the cluster has 32: lower"):
        chosen(9.0)


def test_replicas_of_the_generator_are_counted() -> None:
    workload = configured("cuda", runtime={"generator_replicas": 3})
    [generator] = [p for p in search(workload, machine(4)).roles if p.role.use == "sampled"]
    assert generator.layout.num_devices == 3
    # No GPU has two ranks of one model.
    with pytest.raises(ConfigError, match=r"^runtime.generator_replicas: 3 is not allowed: must be at most 2"):
        search(workload, machine(2))
    # Left out, as many are chosen as there are GPUs for them.
    [chosen] = [p for p in search(configured("cuda"), machine(4)).roles if p.role.use == "sampled"]
    assert chosen.layout.num_devices == 4


def test_a_generator_that_cannot_be_split_is_not() -> None:
    big = {"hidden_size": 8192, "num_layers": 40, "num_heads": 64, "num_kv_heads": 8, "intermediate_size": 28672}
    data = {"base": {"kind": "fresh", **big}, "runtime": {"parallel": "auto"}}

    def degree(more: dict[str, Any]) -> int:
        return plan(recorded_graph(validate(data | more)), machine(32, 40)).stages["ppo-1"].layouts["sampled"].tp

    assert degree({}) > 1
    assert degree({"generator": {"engine": "transformers"}}) == 1


def test_refused_plans_give_their_reason() -> None:
    def refuse(plan: Plan) -> None:
        raise ConfigError(f"no {plan.placement}")

    with pytest.raises(ConfigError, match="no colocated"):
        search(from_parameters(1e8, 1024), machine(1), accept=refuse)


def test_the_cache_holds_enough_and_no_more() -> None:
    # In tokens: 32 sequences of 1,024; of longer ones as many as make 65,536 tokens; one in any case; a small rollout.
    def cached(length: int, dp: int = 1) -> float:
        workload = from_parameters(7e9, length)
        memory = workload.memory(workload.roles[-1], Layout(dp=dp))
        return memory.kv_cache / kv_cache_bytes(workload.roles[-1].shape, 1, 2)

    assert (cached(1024), cached(8192), cached(100_000), cached(1024, dp=256)) == (32 * 1024, 65_536, 100_000, 2 * 1024)


# --- placement


@pytest.mark.parametrize(
    ("count", "devices", "kind"),
    [
        (1e8, 1, "colocated"),
        (1e8, 8, "colocated"),
        (7e9, 16, "colocated"),
        (7.5e9, 64, "colocated"),
        (70e9, 64, "colocated, recomputing"),
    ],
)
def test_devices_are_shared_and_activations_kept_where_they_can_be(count: float, devices: int, kind: str) -> None:
    plan = search(from_parameters(count, 1024), machine(devices))
    assert plan.fits
    assert plan.kind == kind
    assert len(plan.reasons) == len(set(plan.reasons))


def test_a_generator_that_sleeps_makes_room() -> None:
    written = from_parameters(1e9, 1024)
    awake = replace(written, open_choices=written.open_choices - {"sleep", "offload"})
    asleep = replace(written, open_choices=written.open_choices - {"offload"})
    assert search(awake, machine(1, 56)).fits
    assert not search(awake, machine(1, 49)).fits
    in_turn = search(asleep, machine(1, 49))
    assert in_turn.fits
    assert in_turn.workload.generator_sleeps
    policy, reference, critic, reward, generator = [p.memory for p in in_turn.roles]
    trained = [m.process if in_turn.workload.trainer_sleeps else m.resident for m in (policy, critic)]
    frozen = reference.resident + reward.resident
    sync = policy.resident + policy.syncing + critic.resident + generator.resident + generator.syncing + frozen
    generating = generator.total + frozen + sum(trained)
    passing = policy.total + reference.total + critic.total + reward.total + PROCESS_BYTES + generator.graphs
    assert in_turn.fullest.peak_bytes == max(sync, generating, passing)
    assert in_turn.max_num_seqs == in_turn.workload.running_sequences(in_turn.layouts["sampled"])
    # Memory that moves costs time.
    assert search(asleep, machine(1, 49)).seconds["sleep"] > 0


# --- where no plan fits

HOPELESS = [(7e9, 2, 40), (7e9, 1, 40), (70e9, 8, 80), (1e9, 1, 8), (1e8, 1, 2)]


@functools.cache
def suggestions(count: float, there: Machine, **asked: Any) -> list[Suggestion]:
    def planner(changes: Changes, there: Machine) -> GraphPlan:
        return GraphPlan({"ppo": search(changes.of_parameters(count, 1024), there)})

    nearest = planner(Changes(**asked), there)
    assert not nearest.fits
    assert nearest.stages["ppo"].fullest.peak_bytes > there.usable_bytes
    found = list(suggest(planner, Changes(**asked), nearest))
    assert all(planner(s.changes, s.machine).fits for s in found)
    return found


@pytest.mark.parametrize(("count", "devices", "gib"), HOPELESS)
def test_the_least_change_is_suggested(count: float, devices: int, gib: int) -> None:
    workload, there = from_parameters(count, 1024), machine(devices, gib)
    found = {s.change: s for s in suggestions(count, there)}
    assert str(found["memory_gib"].value) in found["memory_gib"].text
    assert not search(workload, machine(devices, found["memory_gib"].value - 1)).fits
    if "num_devices" in found:
        assert not search(workload, machine(found["num_devices"].value - 1, gib)).fits


def test_each_kind_of_change_is_suggested_where_it_helps() -> None:
    found = {s.change for count, *there in HOPELESS for s in suggestions(count, machine(*there))}
    wide = {s.change: s for s in suggestions(1e9, machine(1), micro_batch_tokens=2**19)}
    assert 1024 <= wide["micro_batch_tokens"].value < 2**19
    # Offload and turns are the planner's own choices.
    assert found | wide.keys() == {"num_devices", "memory_gib", "lora_rank", "micro_batch_tokens"}


LONG = 2**18


def long_rows(tokens: int = LONG) -> Workload:
    """10⁹ parameters trained on a row of `tokens` tokens a step."""
    workload = from_parameters(1e9, tokens)
    return replace(workload, roles=workload.roles[:1], batch_size=1, rollout_size=1)


def test_ranks_share_rows_only_where_nothing_else_fits() -> None:
    def chosen(workload: Workload, there: Machine) -> Layout:
        return search(workload, there).layouts["trained"]

    # Tensor parallelism leaves the norms' part of 48 GB, recomputed, on each of four GPUs; shared rows leave a quarter.
    assert chosen(long_rows(), machine(4, 80)) == Layout(tp=4)
    assert chosen(long_rows(), machine(4, 24)) == Layout(zero_stage=2, sp=4)
    [role] = long_rows().with_options(checkpointing=True).roles
    whole, quarter = (long_rows().memory(role, Layout(zero_stage=2, sp=sp)) for sp in (1, 4))
    assert quarter.activations == whole.activations // 4
    assert quarter.optimizer == whole.optimizer // 4
    # No pass of the default size is a single row of these.
    assert chosen(long_rows(4096), machine(8, 24)).sp == 1
    odd = replace(long_rows(), roles=(replace(role, shape=replace(role.shape, num_heads=25)),))
    assert chosen(odd, machine(4, 24)).sp == 1


def test_the_longest_row_that_fits_is_suggested() -> None:
    def planner(changes: Changes, there: Machine) -> GraphPlan:
        return GraphPlan({"sft": search(long_rows(min(LONG, changes.row_tokens or LONG)), there)})

    nearest = planner(UNCHANGED, machine(2, 24))
    assert "activations" in (limit := as_dict(nearest, [], None)["limits"][0])
    assert limit.endswith(f"for a row of {LONG} tokens")
    found = {s.change: s for s in suggest(planner, UNCHANGED, nearest)}
    assert found["num_devices"].value == 4
    assert found["row_tokens"].text == f"rows of at most {found['row_tokens'].value} tokens instead of {LONG}"
    longest = found["row_tokens"].value
    assert search(long_rows(longest), machine(2, 24)).fits
    assert not search(long_rows(longest + 2), machine(2, 24)).fits


def test_the_longest_row_of_a_layout_is_shown() -> None:
    small = search(long_rows(2**12), machine(2, 24))
    shown = as_dict(GraphPlan({"sft": small}), [], None)["stages"]["sft"]
    most = shown["most_sequence_tokens"]
    assert shown["sequence_tokens"] == 2**12 <= most < LONG

    def fits(tokens: int) -> bool:
        return plan_of(
            replace(small.workload, sequence_tokens=tokens), small.machine, small.placement, small.layouts
        ).fits

    assert (fits(most), fits(most + 1)) == (True, False)
    assert most_row_tokens(search(long_rows(), machine(1, 1))) == 0


def test_suggestions_are_allowed_by_the_config(model: str) -> None:
    """Adapters do not go with a frozen trunk, and on CPU nothing can be offloaded, and no generator sleeps."""
    config = validate({"base": {"kind": "pretrained", "model": model, "trainable_layers": 2}})

    def planner(changes: Changes, there: Machine) -> GraphPlan:
        return plan(recorded_graph(config), there, changes, [{"CPU": 8.0}])

    here = Machine(num_devices=1, memory_bytes=4 * GIB, device="cpu")
    found = list(suggest(planner, UNCHANGED, planner(UNCHANGED, here)))
    assert {s.change for s in found} <= {"memory_gib", "micro_batch_tokens"}
    assert "memory_gib" in {s.change for s in found}


# --- config


def configured(device: str = "cpu", stage: str = "ppo-1", **changes: Any) -> Workload:
    workload = stage_workload(recorded_graph(validate(changes)).calls[stage], device)
    assert workload is not None
    return workload


def names(workload: Workload) -> list[str]:
    return [role.name for role in workload.roles]


def test_roles_follow_the_config() -> None:
    assert names(configured()) == ["generator", "policy", "reference", "rewards.0"]
    two: dict[str, Any] = {"ppo": {"stages": [{}, {"critic": "separate"}]}}
    assert names(configured(**two)) == ["generator", "policy", "reference", "rewards.0"]
    assert names(configured(stage="ppo-2", **two)) == ["generator", "policy", "reference", "rewards.0", "critic"]
    trunk: dict[str, Any] = {"base": {"kind": "pretrained", "model": "smollm2-135m", "trainable_layers": 2}}
    shared = configured(**trunk)
    assert names(shared) == ["generator", "policy"]
    assert (shared.roles[1].top_layers, shared.roles[1].branches) == (2, 2)
    assert names(configured(stage="evaluate", **trunk)) == ["generator", "rewards.0", "before", "after"]
    assert names(configured(stage="sft")) == ["policy"]
    assert names(configured(stage="preferences")) == ["generator"]


def test_a_reward_model_of_another_place_is_taken_to_be_like_the_policy() -> None:
    config = {"sft": None, "reward": None, "preferences": None, "reward_ref": "other#reward"}
    roles = {role.name: role for role in configured(**config).roles}
    assert roles["rewards.0"].shape == roles["policy"].shape


def test_a_reward_model_of_the_hub_is_planned_by_its_own_shape(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "vocab_size": 320}))
    none: dict[str, Any] = {"reward": None, "preferences": None}
    found = configured(**none, reward_base={"model": str(tmp_path)})
    roles = {role.name: role for role in found.roles}
    assert (roles["rewards.0"].shape.num_layers, roles["rewards.0"].shape.vocab_size) == (3, 320)
    assert roles["policy"].shape.num_layers != 3
    with pytest.raises(ConfigError, match=r"^reward_base\.model: '\./nowhere' is not a directory$"):
        configured(**none, reward_base={"model": "./nowhere"})


def test_a_checkpoint_is_planned_by_what_lies_beside_its_weights(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "vocab_size": 320}))
    found = configured(base={"kind": "checkpoint", "ref": str(tmp_path)})
    assert (found.roles[0].shape.num_layers, found.roles[0].shape.vocab_size) == (2, 320)
    elsewhere = recorded_graph(validate({"base": {"kind": "checkpoint", "ref": "runs/other#sft"}}))
    with pytest.raises(
        ConfigError, match=r"^sft\.policy: 'runs/other#sft' cannot be planned: must be a checkpoint's dir"
    ):
        plan(elsewhere, machine(1))


def test_lengths_and_batches_follow_the_config() -> None:
    stages = [
        {"max_new_tokens": 8, "minibatch_size": 16, "engine": {"micro_batch_tokens": 512}},
        {"max_new_tokens": 24, "prompts_per_iteration": 128},
    ]
    config: dict[str, Any] = {
        "data": {"max_prompt_tokens": 40},
        "sft": {"max_response_tokens": 32},
        "ppo": {"stages": stages},
    }

    def numbers(stage: str, **more: Any) -> tuple[int, ...]:
        w = configured(stage=stage, **config, **more)
        return w.sequence_tokens, w.response_tokens, w.batch_size, w.rollout_size, w.micro_batch_tokens

    assert numbers("sft") == (72, 32, 64, 64, 4096)
    assert numbers("ppo-1") == (48, 8, 16, 64, 512)
    assert numbers("ppo-2") == (64, 24, 32, 128, 4096)
    # Pairs are as long as the replies that were sampled for them.
    assert numbers("reward", preferences={"source": "gold", "max_new_tokens": 20})[:2] == (60, 20)
    # A published model's context of 40,960 tokens bounds what is written.
    long: dict[str, Any] = {"base": {"kind": "pretrained", "model": "Qwen/Qwen3-0.6B"}, "reward_ref": "other#reward"}
    long |= {"data": {"max_prompt_tokens": 32_768}, "reward": None, "preferences": None}
    bounded = configured(**long, ppo={"stages": [{"max_new_tokens": 32_768}]})
    assert (bounded.sequence_tokens, bounded.response_tokens) == (40_960, 32_768)
    # A fresh model's context of 512 tokens bounds what nothing else does.
    unbounded = configured(stage="sft")
    assert (unbounded.sequence_tokens, unbounded.response_tokens) == (512, 170)


def test_precision_follows_the_device() -> None:
    on_cpu, on_gpu = ({r.name: r.weight_bytes for r in configured(device).roles} for device in ("cpu", "cuda"))
    assert on_cpu == {"generator": 4, "policy": 4, "reference": 4, "rewards.0": 4}
    assert on_gpu == {"generator": 2, "policy": 2, "reference": 2, "rewards.0": 2}


def test_vllms_cache_on_cpu_is_what_it_reserves() -> None:
    workload = configured(runtime={"generator_memory_gib": 2.0})
    assert workload.memory(workload.roles[0], Layout()).kv_cache == 2 * GIB


def test_planning_loads_no_engine_and_no_stage_kind() -> None:
    heavy = {"torch", "ray", "prefect", "deepspeed", "vllm", "transformers"}
    code = (
        "import sys, xray_runtime.ops.planner.description\n"
        "import xray_runtime.ops.planner.suggestions as s, xray_runtime.cluster.pool.machine as m\n"
        "from xray_runtime.ops.planner.search import search\n"
        "plan = lambda changes, there: s.GraphPlan({'ppo': search(changes.of_parameters(7e9, 1024), there)})\n"
        "list(s.suggest(plan, s.Changes(), plan(s.Changes(), m.Machine(num_devices=1, memory_bytes=2**33))))\n"
        f"methods = [n for n in sys.modules if n.startswith('xray_runtime.methods.')]\n"
        f"print(sorted({heavy!r} & set(sys.modules)), [n for n in methods if n.endswith(('.kind', '.lifecycle'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
