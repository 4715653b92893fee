"""Servers that only one machine of a cluster can reach are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xray.flows.lifecycle_graph import recorded_graph
from xray.tasks.command import Command, commanded, current_command, is_commanded
from xray.tasks.preflight import check_ray_address, check_run, check_servers, check_stages
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.methods.loading import load_config

BOTH = {"PREFECT_API_URL": "http://prefect.lan:4200/api", "MLFLOW_TRACKING_URI": "http://10.0.0.9:5000"}


def test_rays_client_is_refused() -> None:
    check_ray_address({})
    check_ray_address({"RAY_ADDRESS": "10.0.0.1:6379"})
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS: 'ray://10.0.0.1:10001' is not allowed: must be HOST:PORT"):
        check_ray_address({"RAY_ADDRESS": "ray://10.0.0.1:10001"})


def test_one_machine_needs_no_servers_of_its_own() -> None:
    check_servers({"10.0.0.1"}, {"PREFECT_API_URL": "http://127.0.0.1:4200/api"})


def test_servers_that_all_can_reach_are_taken() -> None:
    check_servers({"10.0.0.1", "10.0.0.2"}, BOTH)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("PREFECT_API_URL", "http://127.0.0.1:4200/api"),
        ("PREFECT_API_URL", "http://localhost:4200/api"),
        ("MLFLOW_TRACKING_URI", None),
        ("MLFLOW_TRACKING_URI", "sqlite:////shared/mlflow.db"),
        ("MLFLOW_TRACKING_URI", "http://[::1]:5000"),
    ],
)
def test_others_are_refused(name: str, address: str | None) -> None:
    environment = BOTH | {name: address} if address else {k: v for k, v in BOTH.items() if k != name}
    with pytest.raises(ConfigError, match=f"^{name}: .* is not allowed on a cluster of 2 machines"):
        check_servers({"10.0.0.1", "10.0.0.2"}, environment)


def test_a_whole_run_is_checked_stage_by_stage() -> None:
    graph = recorded_graph(load_config(None, ["runtime.cpus_per_workhorse=3"]))
    little, much = [{"CPU": 2.0}], [{"CPU": 64.0}]
    check_run(graph, "cpu", much)
    with pytest.raises(ConfigError, match=r"sft: its models need 3 CPUs"):
        check_run(graph, "cpu", little)
    # A cluster that is not connected yet is asked later.
    check_run(graph, "cpu", None)
    with pytest.raises(ConfigError, match=r"ppo-1: its models need"):
        check_stages([graph.calls["ppo-1"]], "cpu", little)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "gptq", "awq", "bitsandbytes"])
def test_a_quantized_base_is_refused_before_anything_is_computed(tmp_path: Path, method: str) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    graph = recorded_graph(load_config(None, ["base.kind=pretrained", f"base.model={tmp_path}"]))
    check_stages([graph.calls["base"]], "cpu", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"^base\.model: '.*' is not allowed: it is quantized \({method}\): convert"):
        check_stages([graph.calls["base"]], "cpu", None)


def test_layouts_that_auto_chooses_later_ask_for_nothing_yet() -> None:
    one = [{"CPU": 8.0, "GPU": 1.0}]
    with pytest.raises(ConfigError, match=r"need \d+ GPUs"):
        check_run(recorded_graph(load_config(None, [])), "cuda", one)
    check_run(recorded_graph(load_config(None, ["runtime.parallel=auto"])), "cuda", one)
    sleeps = ["runtime.parallel=auto", "runtime.device=cuda", "runtime.generator_sleeps=true"]
    with pytest.raises(ConfigError, match=r"^runtime\.generator_sleeps: "):
        check_run(recorded_graph(load_config(None, sleeps)), "cpu", one)


def test_a_shared_store_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    graph = recorded_graph(load_config(None, [f"runtime.storage=file://{tmp_path / 'file' / 'store'}"]))
    with pytest.raises(ConfigError, match=r"^runtime\.storage: "):
        check_run(graph, "cpu", None)


def test_a_command_holds_in_its_block() -> None:
    assert not is_commanded()
    with commanded(Command(until="sft")):
        assert is_commanded()
        assert current_command().until == "sft"
    assert not is_commanded()
    assert current_command() == Command()
