"""Graphs of every kind are planned, laid out, searched and explained by what their kinds say of their models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import xray
from tests.graphs import GRAPHS, SIZES
from tests.message_texts import Messages
from xray.cli.explain import explained
from xray.flows.search import SearchConfig
from xray.flows.study import VALUES, Search, search_space
from xray.flows.subject import Subject
from xray_runtime.cluster.pool.demand import check_call
from xray_runtime.cluster.pool.machine import GIB, Machine
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.roles import ModelRole
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Model
from xray_runtime.kernel.graph.graph import Graph, recording
from xray_runtime.kernel.graph.kind import KINDS, StageKind
from xray_runtime.kernel.graph.kinds import shipped
from xray_runtime.ops.planner.auto import Changes, choose_layouts, plan
from xray_runtime.ops.planner.cost import score_seconds
from xray_runtime.ops.planner.memory import Layout
from xray_runtime.ops.planner.stage_workload import base_of, stage_workload

ONE = Machine(num_devices=1, memory_bytes=80 * GIB)
EIGHT = Machine(num_devices=8, memory_bytes=80 * GIB)
LAPTOP = Machine(num_devices=1, memory_bytes=16 * GIB, device="cpu")
NODES: list[dict[str, float]] = [{"CPU": 64.0, "GPU": 8.0}]
PARAMETERS = 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 448 + 2 * 64) + 64
"""Of a fresh model of `SIZES`: embeddings; attention, MLP and norms of two layers; the last norm."""


JUDGED = {"generator", "before", "after"}
PPO = {"generator", "policy", "reference"}
MODELS: dict[str, dict[str, set[str]]] = {
    "two judges": {
        "sft": {"policy"},
        "upbeat-judge": {"reward"},
        "interesting-judge": {"reward"},
        "ppo": PPO | {"rewards.0", "rewards.1"},
        "evaluate": JUDGED | {"rewards.0", "rewards.1"},
    },
    "online DPO": {
        "sft": {"policy"},
        "pairs-1": {"generator"},
        "dpo-1": {"policy"},
        "pairs-2": {"generator"},
        "dpo-2": {"policy"},
        "evaluate": JUDGED,
    },
    "tools": {"sft": {"policy"}, "ppo": PPO, "before": {"generator"}, "after": {"generator"}},
    "own kind": {"teacher": {"policy"}, "imitate": {"student", "teacher"}},
    "self-distillation": {"sft": {"policy"}, "distill": {"policy", "generator"}},
    "rejection sampling": {
        "sft": {"policy"},
        "best-1": {"generator"},
        "sft-1": {"policy"},
        "best-2": {"generator"},
        "sft-2": {"policy"},
        "evaluate": JUDGED,
    },
    "own advantage": {"sft": {"policy"}, "ppo": PPO, "evaluate": JUDGED},
    "SFT alone": {"sft": {"policy"}},
    "evaluate alone": {"evaluate": JUDGED},
}
"""Graph → the models of each of its stages that has some."""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """The kinds that a graph registers are removed afterwards, since the registry is global."""
    before = {kind.name for kind in shipped()} | KINDS.keys()
    yield
    for name in KINDS.keys() - before:
        del KINDS[name]


def subject(name: str, output: Path, **parameters: Any) -> Subject:
    return Subject(flow=GRAPHS[name].flow, parameters={"output": str(output), **parameters})


@pytest.mark.parametrize("machine", [ONE, EIGHT, LAPTOP], ids=["1 GPU", "8 GPUs", "CPU"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_stage_with_models_is_planned_and_laid_out(name: str, machine: Machine, tmp_path: Path) -> None:
    graph = subject(name, tmp_path).recorded()
    planned = plan(graph, machine, nodes=NODES)
    assert planned.fits
    found = {stage: {p.role.name for p in chosen.roles} for stage, chosen in planned.stages.items()}
    assert found == MODELS[name]
    for call in graph.calls.values():
        chosen, text = choose_layouts(call, machine, NODES)
        assert (text is not None) == (call.name in planned.stages)
        check_call(chosen, machine.device, NODES)
        if text is None:
            assert chosen == call
            continue
        models = chosen.kind.models(chosen.config)
        assert found[call.name] == set(models)
        layouts = planned.stages[call.name].layouts
        ranks = 0
        for role in models.values():
            size = getattr(role.layout, "num_workhorses", None)
            size = size or role.layout.tensor_parallel * chosen.runtime.generator_replicas
            assert size == layouts[role.use].num_devices
            ranks += size
        if machine.device == "cuda":
            assert ranks * chosen.runtime.gpus_per_workhorse <= machine.num_devices
            # One GPU is shared by all of a stage's models, and by no other stage's.
            if machine is ONE:
                assert chosen.runtime.gpus_per_workhorse == pytest.approx(1 / ranks, abs=1e-3)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_is_searched(name: str, tmp_path: Path) -> None:
    case = GRAPHS[name]
    wanted = {"fields": case.fields, "until": case.until, "metric": case.metric, "mode": case.mode, "trials": 1}
    wanted = SearchConfig.model_validate(wanted)
    searched = subject(name, tmp_path)
    space = search_space(searched, wanted)
    search = Search(tmp_path, searched, wanted, space)
    search.directory.mkdir(parents=True)
    values = next(search.waiting()).user_attrs[VALUES]
    applied = searched.with_values(values)
    calls = applied.recorded().calls
    before = searched.recorded().calls
    for path, value in values.items():
        if "." not in path:
            assert applied.parameters[path] == value
            continue
        stage, _, field = path.partition(".")
        found = calls[stage].config_json()
        for key in field.split("."):
            found = found[int(key) if isinstance(found, list) else key]
        assert found == value
        assert calls[stage] != before[stage]
    assert set(calls) == set(before)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_is_explained(name: str, tmp_path: Path) -> None:
    graph = subject(name, tmp_path).recorded()
    lines = explained(graph, tmp_path)
    assert [stage for stage, _, _ in lines] == list(graph.calls)
    assert lines[0][1:] == ("compute", "never computed in this directory")
    assert lines[-1][1] == "compute"


def test_sft_needs_less_than_ppo_on_the_same_base() -> None:
    with recording() as graph:
        chats = xray.prepare(source="chitchat", max_prompt_tokens=64)
        base = xray.fresh_base(chats, **SIZES)
        xray.sft(base, chats, max_response_tokens=16)
        xray.ppo(base, prompts=chats, rewards=[lambda_score], gold=None)
    stages = plan(graph, ONE).stages
    [policy] = stages["sft"].roles
    # bfloat16 weights and gradients, sums of gradients in float32; masters and Adam's two moments in float32.
    states = (policy.memory.weights, policy.memory.gradients, policy.memory.optimizer)
    assert states == (2 * PARAMETERS, (2 + 4) * PARAMETERS, (4 + 8) * PARAMETERS)
    together = {p.role.name: p.memory for p in stages["ppo"].roles}
    assert together["policy"].weights == together["reference"].weights == 2 * PARAMETERS
    assert together["generator"].weights == 2 * PARAMETERS
    assert stages["ppo"].fullest.peak_bytes == sum(memory.total for memory in together.values())
    assert stages["sft"].fullest.peak_bytes == policy.memory.total < stages["ppo"].fullest.peak_bytes
    assert (stages["sft"].workload.sequence_tokens, stages["ppo"].workload.sequence_tokens) == (80, 80)


def test_a_policy_with_adapters_needs_no_second_model_for_its_reference() -> None:
    fields: dict[str, Any] = {"rewards": [lambda_score], "gold": None, "lora": {"rank": 8}}
    with recording() as graph:
        chats = xray.prepare(source="chitchat", max_prompt_tokens=64)
        base = xray.fresh_base(chats, **SIZES)
        sft = xray.sft(base, chats, max_response_tokens=16)
        xray.ppo(sft, prompts=chats, **fields)
        xray.ppo(sft, prompts=chats, reference=sft, **fields)
        xray.ppo(sft, prompts=chats, reference=base, **fields)
    names = [{p.role.name for p in stage.roles} for stage in plan(graph, EIGHT).stages.values()][1:]
    assert names == [{"policy", "generator"}, {"policy", "generator"}, {"policy", "generator", "reference"}]
    alone, again, other = (stage_workload(call, "cuda") for call in list(graph.calls.values())[3:])
    assert alone == again
    assert alone is not None
    assert other is not None
    # The policy scores a rollout once more, without its adapters.
    for workload, passes in ((alone, 2), (other, 1)):
        [policy] = [role for role in workload.roles if role.use == "trained"]
        once = score_seconds(replace(policy, scored_passes=1), Layout(), workload, EIGHT)
        assert score_seconds(policy, Layout(), workload, EIGHT) == pytest.approx(passes * once)


def lambda_score(prompts: list[str], replies: list[str]) -> list[float]:
    return [0.0 for _ in replies]


def test_a_teacher_has_the_shape_of_what_made_it(tmp_path: Path) -> None:
    graph = subject("own kind", tmp_path).recorded()
    roles = {p.role.name: p for p in plan(graph, ONE).stages["imitate"].roles}
    # Six more layers.
    more = 6 * (4 * 64 * 64 + 3 * 64 * 448 + 2 * 64)
    assert roles["student"].role.shape.num_parameters == PARAMETERS
    assert roles["teacher"].role.shape.num_parameters == PARAMETERS + more
    assert roles["teacher"].memory.weights == 2 * (PARAMETERS + more)
    # The trained teacher comes from the fresh model through a stage between.
    assert base_of(graph.calls["imitate"], "teacher", "")[1] == "large.model"


def test_layouts_go_where_a_kind_says(tmp_path: Path) -> None:
    """A teacher of 17 billion parameters in bfloat16, 34 GB, is split to fit GPUs of 24 GiB; its student is not."""
    from tests.imitate import imitate

    wide = {"hidden_size": 4096, "num_layers": 80, "num_heads": 32, "num_kv_heads": 32, "intermediate_size": 12288}
    with recording() as graph:
        chats = xray.prepare(source="chitchat", max_prompt_tokens=64)
        large = xray.fresh_base(chats, **wide, name="large")
        imitate(xray.fresh_base(chats, **SIZES), large, chats)
    machine = Machine(num_devices=8, memory_bytes=24 * GIB)
    chosen, text = choose_layouts(graph.calls["imitate"], machine)
    teacher, engine = chosen.config.frozen, chosen.config.engine
    assert isinstance(engine, EngineConfig)
    # 34 GB over the eight GPUs that both models share.
    assert (teacher.num_workhorses, teacher.tensor_parallel) == (8, 2)
    assert (engine.tensor_parallel, engine.pipeline_parallel) == (1, 1)
    assert engine.sharding_level < 3
    assert text is not None
    assert "teacher TP2 DP4" in text


def test_a_workspace_takes_what_the_planner_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`runtime.parallel: auto` in Python: the same function as `xray plan` and YAML, for the cluster's machine."""
    from xray.tasks import workspace

    monkeypatch.setattr(workspace, "cluster_machine", lambda runtime: EIGHT)
    monkeypatch.setattr(workspace, "nodes", lambda: NODES)
    with recording() as graph:
        chats = xray.prepare(source="chitchat", max_prompt_tokens=448)
        xray.sft(xray.fresh_base(chats, **SIZES), data=chats, max_response_tokens=64)
    opened = workspace.Workspace(tmp_path, runtime={"parallel": "auto"})
    chosen = opened.laid_out(graph.calls["sft"])
    # 64 sequences of 512 tokens are eight micro-batches of 4,096: all eight GPUs are of use.
    assert chosen.config.engine.num_workhorses == 8
    assert chosen == choose_layouts(graph.calls["sft"], EIGHT, NODES)[0]
    assert workspace.Workspace(tmp_path).laid_out(graph.calls["sft"]) is graph.calls["sft"]


def test_a_trial_sets_fields_of_the_workspace_that_its_flow_opens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from xray.tasks import workspace
    from xray.tasks.command import Command, commanded, is_commanded

    monkeypatch.setattr(workspace.Workspace, "submit", lambda self, call: None)
    fields = {"sft.lr": 0.5, "sft.engine.micro_batch_tokens": 64}
    with commanded(Command(output=str(tmp_path), until="sft", fields=fields)):
        opened = workspace.Workspace("elsewhere")
    assert not is_commanded()
    assert (opened.output, opened.until) == (tmp_path, "sft")
    Graph.__enter__(opened)
    try:
        chats = xray.prepare(source="chitchat")
        sft = xray.sft(xray.fresh_base(chats), data=chats, lr=0.1)
    finally:
        Graph.__exit__(opened, None, None, None)
    assert sft.call is not None
    assert (sft.call.config.lr, sft.call.config.engine.micro_batch_tokens) == (0.5, 64)


def test_fields_that_auto_chooses_must_not_be_written(tmp_path: Path) -> None:
    auto = {"parallel": "auto"}
    assert subject("SFT alone", tmp_path, runtime=auto).recorded().runtime.parallel == "auto"
    written = subject("SFT alone", tmp_path, runtime=auto).with_values({"sft.engine.num_workhorses": 2})
    with pytest.raises(
        ConfigError, match=r"^sft\.engine\.num_workhorses: 2 is not allowed with runtime\.parallel 'auto'"
    ):
        written.recorded()


def test_the_runtime_of_a_flow_is_set_from_outside(tmp_path: Path) -> None:
    said = subject("SFT alone", tmp_path, runtime={"threads": 3})
    chosen = said.with_values({"runtime.parallel": "auto", "runtime.snapshot_every": 2}).recorded()
    assert (chosen.runtime.parallel, chosen.runtime.snapshot_every, chosen.runtime.threads) == ("auto", 2, 3)
    assert {call.runtime.parallel for call in chosen.calls.values()} == {"auto"}
    with pytest.raises(ConfigError, match=r"^runtime\.thread: unknown field \(did you mean threads\?\)"):
        said.with_values({"runtime.thread": 2}).recorded()


def only(graph: Graph, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(graph, ONE, Changes(**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_graph_without_a_plan_is_one_line(tmp_path: Path) -> None:
    from tests.imitate import ImitateConfig, ImitateInputs

    with recording() as nothing:
        xray.prepare(source="chitchat")
    assert only(nothing) == "this graph cannot be planned: no stage has models"
    alone = subject("evaluate alone", tmp_path).recorded()
    assert only(alone, lora_rank=8) == "LoRA, offload and micro-batches are not allowed: no stage trains a model"
    with recording() as elsewhere:
        chats = xray.prepare(source="chitchat")
        xray.sft(elsewhere.checkpoint("runs/other#base"), data=chats)
    assert only(elsewhere).startswith(
        "sft.policy: 'runs/other#base' cannot be planned: must be a checkpoint's directory"
    )
    shapeless = StageKind(
        "shapeless",
        ImitateConfig,
        ImitateInputs,
        Model,
        "tests.imitate:imitate",
        models=lambda config: {"judge": ModelRole(use="frozen", layout=config.frozen, field="frozen", shape=None)},
    )
    with recording() as graph:
        chats = xray.prepare(source="chitchat")
        base = xray.fresh_base(chats)
        shapeless(base, base, chats)
    assert only(graph).startswith(
        "shapeless.judge: cannot be planned: 'shapeless' has no input model with a known shape"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"stepz": {"low": 1, "high": 2}},
        {"sft.stepz": {"low": 1, "high": 2}},
        {"stf.lr": {"low": 1, "high": 2}},
        {"sft.lr": {"low": -1, "high": 2}},
        {"steps": {"low": 1.5, "high": 2}},
        {"output": {"choices": ["a", "b"]}},
    ],
)
def test_fields_a_flow_lacks_are_not_searched(fields: dict[str, Any], tmp_path: Path, message_texts: Messages) -> None:
    wanted = SearchConfig.model_validate({"fields": fields, "until": "sft"})
    with message_texts.raises(ConfigError):
        search_space(subject("SFT alone", tmp_path), wanted)
