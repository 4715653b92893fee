"""What people see: the summary of a stage, and `xray status`."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from prefect.events.schemas.automations import EventTrigger
from rich.console import Console

from xray.deployments.automations import crashed_without_heartbeat
from xray.deployments.server_home import ServerHome, State
from xray.deployments.status import service_status, show
from xray.tasks.spec import StageResult
from xray.tasks.summary import BARS, sparkline, stage_markdown
from xray_runtime.stages.kind import StageKind, find_kind
from xray_runtime.store.ref import CheckpointRef

SHA = "ab" * 32


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 1.0], "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], BARS),
        ([math.nan, 0.0, math.inf, 1.0], "▁█"),
        # 48 values in 24 bars of two: means 0.5, 2.5, …, 46.5; each eighth of the span takes three of them.
        (list(range(48)), "".join(bar * 3 for bar in BARS)),
    ],
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def result(directory: Path) -> StageResult:
    checkpoint = CheckpointRef(uri=str(directory), sha256=SHA, stage="ppo-1", kind="ppo", type="Model", step=2)
    return StageResult(
        name="ppo-1",
        kind="ppo",
        key="k",
        checkpoint=checkpoint,
        parents={"policy": "cd" * 32},
        dataset=None,
        mlflow_run_id="r",
        seconds=12.34,
        attempts=2,
    )


def kind(name: str) -> StageKind:
    found = find_kind(name)
    assert found is not None
    return found


def test_a_stage_leads_to_mlflow_and_shows_its_curves(tmp_path: Path) -> None:
    series = {"reward/mean": [(0, 0.5), (1, 1.5)], "secret/other": [(0, 1.0)]}
    text = stage_markdown(kind("ppo"), result(tmp_path), series, "http://m/#/run", "http://m/training.png")
    assert "took 12.3 s in 2 attempts: `abababababab`" in text
    assert "](http://m/#/run)" in text
    assert "- policy: `cdcdcdcdcdcd`" in text
    assert "| reward/mean | 0.5 | 1.5 | ▁█ |" in text
    assert "![training curves](http://m/training.png)" in text
    assert "secret" not in text
    plain = stage_markdown(kind("ppo"), result(tmp_path), {}, None, None)
    assert "http" not in plain
    assert "| metric" not in plain


def test_an_evaluation_shows_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text('{"win_rate": 0.87654, "win_rate_ci95": [0, 1], "samples": 16}')
    text = stage_markdown(kind("evaluate"), result(tmp_path), {}, None, None)
    assert "| win_rate | 0.8765 |" in text
    assert "| samples | 16 |" in text
    assert "ci95" not in text


def test_status_of_nothing_and_of_what_was_killed(tmp_path: Path) -> None:
    home = ServerHome(tmp_path)
    nothing = service_status(home, None)
    assert (nothing["up"], nothing["services"], nothing["champions"]) == (False, {}, [])
    assert "nothing was started in" in shown(nothing)
    dead = service_status(home, State(tag="ef"))
    assert set(dead["services"]) == {"prefect", "mlflow", "ray", "worker"}
    assert not dead["up"]
    assert dead["runs"] is None
    assert "Prefect does not answer" in shown(dead)


def test_status_shows_runs_and_champions(tmp_path: Path) -> None:
    content = service_status(ServerHome(tmp_path), State(tag="ef"))
    run = {"id": "1", "name": "[demo] seed 0", "state": "Running", "at": "2026-01-02T03:04:05Z", "deployment": None}
    champion = {"name": "demo-policy", "version": "3", "checkpoint": SHA, "by": "Ada", "at": "2026-01-01T00:00:00"}
    text = shown(content | {"runs": [run], "next": [], "champions": [champion]})
    assert "Running" in text
    assert "[demo] seed 0" in text
    assert "2026-01-02 03:04:05 UTC" in text
    assert "version 3 abababababab, by Ada" in text


def shown(content: dict[str, Any]) -> str:
    file = io.StringIO()
    show(Console(file=file, width=200), content)
    return file.getvalue()


def test_a_run_that_waits_for_somebody_is_not_taken_for_crashed() -> None:
    trigger = crashed_without_heartbeat().trigger
    assert isinstance(trigger, EventTrigger)
    assert {"prefect.flow-run.Suspended", "prefect.flow-run.Completed"} <= trigger.expect
