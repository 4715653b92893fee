"""The deployments of `deployments/presets.py` are what the configs and the flows say, and Prefect reads them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint

from xray.deployments.names import QUEUE
from xray.deployments.presets import VARIABLES, as_yaml, deployments
from xray_runtime.methods.loading import load_config, validate

ROOT = Path(__file__).parents[3]
VALUES = {
    "XRAY_HOME": "/home/x",
    "RAY_ADDRESS": "127.0.0.1:6379",
    "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000",
    "XRAY_TIMEZONE": "Europe/Berlin",
}
DEPLOYMENTS: dict[str, dict[str, Any]] = {d["name"]: d for d in deployments(VALUES)}


@pytest.mark.parametrize(
    ("name", "config"), [("lifecycle", "quickstart"), ("lifecycle-tiny", "tiny"), ("tune", "quickstart")]
)
def test_presets_are_the_configs(name: str, config: str) -> None:
    assert validate(DEPLOYMENTS[name]["parameters"]["config"]) == load_config(ROOT / "configs" / f"{config}.yaml")


def test_the_search_is_the_example() -> None:
    from xray.flows.search import SearchConfig, load_search

    search = SearchConfig.model_validate(DEPLOYMENTS["tune"]["parameters"]["search"])
    assert search == load_search(ROOT / "configs" / "search" / "quickstart-ppo.yaml")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_parameters_are_those_of_the_flow(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    arguments = set(load_flow_from_entrypoint(deployment["entrypoint"]).parameters.properties)
    assert set(deployment["parameters"]) <= arguments
    if "output" in arguments:
        assert deployment["parameters"]["output"] == "/home/x/output"
    assert "xray" in deployment["tags"]


def test_only_long_computations_run_one_at_a_time() -> None:
    queued = {name for name, d in DEPLOYMENTS.items() if d["work_pool"].get("work_queue_name") == QUEUE}
    assert queued == {"lifecycle", "lifecycle-tiny", "flywheel", "tune"}
    assert set(DEPLOYMENTS) - queued == {"audit", "plan", "promote", "rollback", "export", "prune"}
    # After a power cut such a limit keeps its slot for minutes, and the run that goes on would wait for itself.
    assert {name for name, d in DEPLOYMENTS.items() if "concurrency_limit" in d} == {"audit"}


def test_three_run_by_themselves() -> None:
    schedules = {name: d["schedules"] for name, d in DEPLOYMENTS.items() if "schedules" in d}
    assert schedules == {
        "lifecycle": [{"slug": "nightly", "cron": "0 2 * * *", "timezone": "Europe/Berlin"}],
        "flywheel": [{"slug": "nightly", "cron": "0 4 * * *", "timezone": "Europe/Berlin"}],
        "audit": [{"slug": "hourly", "cron": "17 * * * *", "timezone": "Europe/Berlin"}],
    }


def test_the_file_for_prefect_deploy_says_the_same() -> None:
    text = as_yaml()
    assert all(f"#   {name} " in text for name in VARIABLES)
    for name, value in VALUES.items():
        text = text.replace(f"{{{{ ${name} }}}}", value)
    content = yaml.safe_load(text)
    pull = [{"prefect.deployments.steps.set_working_directory": {"directory": "/home/x"}}]
    assert content == {"pull": pull, "deployments": list(DEPLOYMENTS.values())}


def test_a_deployment_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weekly.py").write_text(
        "from xray.deployments.presets import Deployment\n"
        "REPORT = Deployment(name='report', description='', flow='weekly.report', schedule=('weekly', '0 6 * * 1'))\n"
        "PLAN = Deployment(name='plan', description='Plan.', flow='weekly.plan')\n"
    )
    information = tmp_path / "weekly-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: weekly\nVersion: 1\n")
    points = information / "entry_points.txt"
    points.write_text("[xray.deployments]\nreport = weekly:REPORT\n")
    monkeypatch.syspath_prepend(tmp_path)
    *ours, theirs = deployments(VALUES)
    assert ours == list(DEPLOYMENTS.values())
    assert (theirs["entrypoint"], theirs["parameters"]) == ("weekly.report", {"output": "/home/x/output"})
    points.write_text("[xray.deployments]\nplan = weekly:PLAN\n")
    with pytest.raises(
        ValueError, match=r"^deployment 'plan' is defined twice: xray\.flows\.plan\.plan, weekly\.plan$"
    ):
        deployments(VALUES)
