"""What a workspace hands to Prefect for each call: the task, and the futures of the stages that it waits for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import xray
from xray.tasks.workspace import Workspace
from xray_runtime.kernel.graph.graph import Graph


class Runner:
    """Ray's place: remembers what was submitted, and returns it in place of a future."""

    def __init__(self) -> None:
        self.submitted: dict[str, dict[str, Any]] = {}

    def submit(self, task: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        self.submitted[task.name] = parameters
        return parameters


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of a workspace whose calls are submitted and never run."""
    workspace, runner = Workspace(tmp_path / "run", checked=True), Runner()
    monkeypatch.setattr(workspace, "_runner", runner, raising=False)
    monkeypatch.setattr(workspace, "context", SimpleNamespace(node=None), raising=False)
    Graph.__enter__(workspace)
    yield runner
    Graph.__exit__(workspace, None, None, None)


def test_ppo_waits_for_both_judges_and_they_wait_for_nothing_of_each_other(runner: Runner) -> None:
    """Prefect and Ray start a task when the futures among its parameters are done (`tests/e2e/test_graph.py`)."""
    data, base = xray.prepare(source="x.jsonl"), xray.base(model="x")
    pairs = xray.preferences(source="dataset", path="y.jsonl")
    judges = [xray.reward_model(base, data=pairs, name=name) for name in ("upbeat", "interesting")]
    policy = xray.ppo(base, data, rewards=[judges[0], 0.5 * judges[1]])
    xray.evaluate(policy, base, data, rewards=[judges[0]])
    made = runner.submitted
    assert made["ppo"]["parents"] == {
        "policy": made["base"],
        "prompts": made["prepare"],
        "rewards.0": made["upbeat"],
        "rewards.1": made["interesting"],
    }
    for name in ("upbeat", "interesting"):
        assert made[name]["parents"] == {"policy": made["base"], "data": made["preferences"]}
    assert made["evaluate"]["parents"]["policy"] is made["ppo"]
