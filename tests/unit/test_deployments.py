"""deployments/prefect.yaml says what the flows and configs say."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from xray.flows.search import SearchConfig, load_search
from xray_runtime.config.loading import load_config, validate

ROOT = Path(__file__).parents[2]
FILE = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
DEPLOYMENTS: dict[str, dict[str, Any]] = {d["name"]: d for d in FILE["deployments"]}


@pytest.mark.parametrize(
    ("name", "preset"), [("lifecycle", "quickstart"), ("lifecycle-tiny", "tiny"), ("tune", "quickstart")]
)
def test_presets_are_the_configs(name: str, preset: str) -> None:
    parameters = DEPLOYMENTS[name]["parameters"]
    assert validate(parameters["config"]) == load_config(ROOT / "configs" / f"{preset}.yaml")


def test_the_search_is_the_example() -> None:
    search = SearchConfig.model_validate(DEPLOYMENTS["tune"]["parameters"]["search"])
    assert search == load_search(ROOT / "configs" / "search" / "quickstart-ppo.yaml")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_parameters_are_those_of_the_flow(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    module, _, function = deployment["entrypoint"].rpartition(".")
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    (flow,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert "flow" in {decorator.func.id for decorator in flow.decorator_list}  # type: ignore[attr-defined]
    assert set(deployment["parameters"]) <= {argument.arg for argument in flow.args.args}
    assert "xray" in deployment["tags"]


def test_what_computes_is_one_at_a_time() -> None:
    for name in ("lifecycle", "lifecycle-tiny", "tune", "promote", "prune"):
        assert DEPLOYMENTS[name]["work_pool"]["work_queue_name"] == "ray"
    for name in ("lifecycle", "lifecycle-tiny", "tune"):
        assert DEPLOYMENTS[name]["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert DEPLOYMENTS["lifecycle"]["schedules"][0]["timezone"] == "{{ $XRAY_TIMEZONE }}"
