"""What a lifecycle asks of a cluster, and what is said where that is too much."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

import xray
from tests.message_texts import Messages
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.cluster.pool.demand import Demand, call_demands, check_call
from xray_runtime.engines.layouts import EngineConfig, LayoutConfig
from xray_runtime.engines.roles import ModelRole
from xray_runtime.kernel.config.section import RuntimeConfig, Section
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import may_retry
from xray_runtime.kernel.graph.artifacts import Model
from xray_runtime.kernel.graph.graph import Graph
from xray_runtime.kernel.graph.kind import NoInputs, StageKind
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.methods.loading import validate

TWO_CORES = [{"CPU": 2.0, "memory": 1e9}]


def config(**runtime: Any) -> LifecycleConfig:
    stages = [{"engine": {"num_workhorses": 4, "zero_stage": 3}, "critic": "separate"}]
    return validate({"ppo": {"stages": stages}, "sft": {"engine": {"num_workhorses": 2}}, "runtime": runtime})


def check_graph(graph: Graph, device: str, nodes: Any) -> None:
    for call in graph.calls.values():
        check_call(call, device, nodes)


def check_config(config: LifecycleConfig, device: str, nodes: Any) -> None:
    check_graph(recorded_graph(config), device, nodes)


def stage_demands(config: LifecycleConfig, device: str) -> dict[str, list[Demand]]:
    demands = {name: call_demands(call, device) for name, call in recorded_graph(config).calls.items()}
    return {name: found for name, found in demands.items() if found}


def test_every_stage_that_holds_models_is_counted() -> None:
    found = {stage: {d.role: d.num_ranks for d in ds} for stage, ds in stage_demands(config(), "cpu").items()}
    assert found == {
        "sft": {"policy": 2},
        "preferences": {"generator": 1},
        "reward": {"reward": 1},
        "ppo-1": {"generator": 1, "policy": 4, "reference": 1, "rewards.0": 1, "critic": 4},
        "evaluate": {"generator": 1, "before": 1, "after": 1, "rewards.0": 1},
    }


def test_stages_that_are_left_out_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", "vader")
    reward = {"reward": None, "preferences": None, "rewards": [{"function": "vader:score"}]}
    found = stage_demands(validate({"sft": None, **reward}), "cpu")
    assert {stage: [d.role for d in ds] for stage, ds in found.items()} == {
        "ppo-1": ["generator", "policy", "reference"],
        "evaluate": ["generator", "before", "after"],
    }


class Pair(Section):
    engine: EngineConfig = EngineConfig()


class DistillConfig(Section):
    """Of a user's own kind: engines where no kind of ours has any."""

    pairs: list[Pair] = Field(default_factory=list)
    teacher: LayoutConfig = LayoutConfig()


def test_a_kind_of_the_users_own_is_asked_like_ours() -> None:
    distill = StageKind(
        "distill",
        DistillConfig,
        NoInputs,
        Model,
        "nowhere:run",
        models=lambda config: {
            "student": ModelRole(use="trained", layout=config.pairs[0].engine, field="pairs.0.engine", shape=None),
            "teacher": ModelRole(use="frozen", layout=config.teacher, field="teacher", shape=None),
        },
    )
    with Graph(runtime=RuntimeConfig(gpus_per_workhorse=0.5)) as graph:
        engine = {"num_workhorses": 3, "zero_stage": 3, "offload": "nvme", "nvme_path": "/nvme"}
        handle = distill(name="small", pairs=[{}, {"engine": engine}], teacher={"num_workhorses": 2})
    assert handle.call is not None
    assert [(d.role, d.num_ranks, d.gpus) for d in call_demands(handle.call, "cuda")] == [
        ("student", 1, 0.5),
        ("teacher", 2, 0.5),
    ]
    with pytest.raises(ConfigError, match=r"^small\.pairs\.1\.engine\.offload = 'nvme' is not supported with library"):
        check_graph(graph, "cpu", TWO_CORES)
    with pytest.raises(ConfigError, match=r"^small: its models need 2 GPUs \(student 1 × 0.5, teacher 2 × 0.5\)"):
        check_graph(graph, "cuda", [{"CPU": 4.0, "GPU": 1.0}])


@pytest.mark.parametrize("field", ["generator_sleeps", "trainer_sleeps"])
def test_models_that_share_a_gpu_in_turn_cannot_run_at_once(field: str) -> None:
    runtime = RuntimeConfig(device="cuda").model_copy(update={field: True})
    with Graph(runtime=runtime):
        chats, base = xray.prepare(source="x.jsonl"), xray.base(model="x")
        judge = xray.reward_model(base, data=xray.preferences(source="dataset", path="y.jsonl"))
        with pytest.raises(ConfigError, match=rf"^late: lag = 1 must be 0 with runtime\.{field} = True"):
            xray.ppo(base, prompts=chats, rewards=[judge], lag=1, name="late")


def test_demand_may_equal_capacity() -> None:
    # PPO: 11 Workhorses; 11 × 2/11 = 2 CPUs, but for rounding.
    check_config(config(cpus_per_workhorse=2 / 11), "cpu", TWO_CORES)
    check_config(config(cpus_per_workhorse=1.0), "cpu", [{"CPU": 8.0}, {"CPU": 3.0}])


@pytest.mark.parametrize("layout", [{"pipeline_parallel": 2}, {"zero_stage": 1}])
def test_megatrons_cuda_options_are_refused_on_cpu(layout: dict[str, int], message_texts: Messages) -> None:
    engine = {"library": "megatron", "num_workhorses": 2} | layout
    asked = validate({"ppo": {"stages": [{}, {"critic": "separate", "critic_engine": engine}]}})
    with message_texts.raises(ConfigError):
        check_config(asked, "cpu", [{"CPU": 64.0}])
    check_config(asked, "cuda", [{"CPU": 64.0, "GPU": 64.0}])
    deepspeed = validate({"sft": {"engine": {"num_workhorses": 2} | layout}})
    check_config(deepspeed, "cpu", [{"CPU": 64.0}])


@pytest.mark.parametrize(
    ("runtime", "device", "nodes"),
    [
        ({"cpus_per_workhorse": 0.25}, "cpu", TWO_CORES),
        ({"cpus_per_workhorse": 0.0}, "cuda", TWO_CORES),
        ({"cpus_per_workhorse": 0.0}, "cuda", [{"GPU": 8.0}, {"CPU": 4.0}]),
        ({"cpus_per_workhorse": 3.0}, "cpu", [TWO_CORES[0]] * 40),
    ],
)
def test_missing_devices_are_named_and_never_retried(
    runtime: dict[str, Any], device: str, nodes: Any, message_texts: Messages
) -> None:
    with message_texts.raises(ConfigError) as caught:
        check_config(config(**runtime), device, nodes)
    assert not may_retry(caught.value)


@pytest.mark.parametrize("who", ["generator", "trainer"])
def test_sleep_is_for_gpus(who: str) -> None:
    wanted = validate({"runtime": {f"{who}_sleeps": True}})
    with pytest.raises(ConfigError, match=rf"^runtime\.{who}_sleeps: true is not allowed on CPU"):
        check_config(wanted, "cpu", TWO_CORES)
    check_config(wanted, "cuda", [{"CPU": 2.0, "GPU": 8.0}])


def test_disks_are_for_gpus() -> None:
    engine = {"zero_stage": 3, "offload": "nvme", "nvme_path": "/nvme"}
    wanted = validate({"reward": {"engine": engine}})
    with pytest.raises(ConfigError, match=r"^reward\.engine\.offload = 'nvme' is not supported with library"):
        check_config(wanted, "cpu", TWO_CORES)
    check_config(wanted, "cuda", [{"CPU": 2.0, "GPU": 8.0}])
