"""What people see: the summary of a stage, and `xray status`."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.automations import Automation
from prefect.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.automations import EventTrigger as ServerTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from rich.console import Console

from xray.deployments.automations import PREFIX, crashed_without_heartbeat, notifications, waiting_in_queue
from xray.deployments.server_home import ServerHome, State
from xray.deployments.status import service_status, show
from xray.deployments.suspension import LOST, STOPPED
from xray.tasks.spec import StageResult
from xray.tasks.summary import BARS, headline, run_description, sparkline, stage_markdown
from xray_runtime.kernel.graph import kinds
from xray_runtime.kernel.graph.kind import StageKind
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.store.ref import CheckpointRef

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


def test_the_headline_says_what_came_out(tmp_path: Path) -> None:
    series = {"reward/mean": [(0, 0.77), (1, 0.9), (2, 1.12)], "kl/reference_k1": [(0, 4.7)], "other": [(0, 1.0)]}
    assert headline(kind("ppo"), result(tmp_path), series) == "reward 0.77 → 1.12, KL 4.7"
    assert headline(kind("ppo"), result(tmp_path), {}) == ""
    (tmp_path / "evaluation.json").write_text('{"win_rate": 0.86, "gold_delta": null, "kl": 4.03, "judge": "gold"}')
    assert headline(kind("evaluate"), result(tmp_path), {}) == "win rate 0.86, KL 4.03"


def test_a_run_in_mlflow_says_what_came_out_and_leads_to_its_model(tmp_path: Path) -> None:
    interval = {"win_rate_ci95": [0.5, 0.7], "samples": 64, "tied": 2, "win_rate": 0.6, "judges": True}
    content = {
        "project": "demo",
        "seed": 3,
        "status": "completed",
        "evaluation": {"judges": {"gold": interval}, "gold_after": None, "reward_after": None, "kl": 4.0},
        "registered": {"name": "demo-policy", "version": "4", "alias": "candidate"},
        "stages": [
            {"name": "prepare", "checkpoint": {"sha256": SHA}, "dataset": None},
            {"name": "sft", "checkpoint": {"sha256": "cd" * 32}, "dataset": SHA},
        ],
    }
    text = run_description(content, "http://p/1", tmp_path)
    assert text.splitlines()[0] == "**demo**, seed 3: completed."
    assert "| win rate | 0.600 (95%: 0.500 to 0.700) over 64 held-out prompts, 2 tied, by gold |" in text
    assert "[demo-policy version 4](#/models/demo-policy/versions/4)" in text
    assert "- Data: `prepare` (abababababab)" in text
    assert "[Its run in Prefect](http://p/1)" in text
    empty = run_description(content | {"evaluation": None, "registered": None, "stages": []}, None, tmp_path)
    assert "Model" not in empty
    assert "Data" not in empty
    failed = run_description(content | {"status": "failed", "failure": "reward: no memory"}, None, tmp_path)
    assert failed.splitlines()[0] == "**demo**, seed 3: failed: reward: no memory"


def test_headlines_name_metrics_that_exist() -> None:
    metrics = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    shipped = kinds.shipped()
    for name in (name for each in shipped for name in each.headline if "/" in name):
        group, _, metric = name.partition("/")
        assert f"`{group}/" in metrics, name
        assert metric in metrics, name


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
    at_work, suspended = run("[demo] seed 0", "Running"), run("demo seed 1", "Suspended")
    waiting, audit, nightly = (
        run("odd-koel", "Late", "tiny"),
        run("a", "Scheduled", "audit"),
        run("b", "Scheduled", "n"),
    )
    champion = {"name": "demo-policy", "version": "3", "checkpoint": SHA, "by": "Ada", "at": "2026-01-01T00:00:00"}
    kinds = {"runs": [at_work], "suspended": [suspended], "waiting": [waiting], "next": [audit, nightly]}
    lines = shown(content | kinds | {"champions": [champion]}).splitlines()[4:]
    assert [line.split()[0] for line in lines] == ["on", "suspended", "waiting", "next", "next", "champion"]
    assert "[demo] seed 0" in lines[0]
    assert "2026-01-02 03:04:05 UTC" in lines[0]
    assert "demo seed 1" in lines[1]
    assert "tiny" in lines[2]
    assert "behind [demo] seed 0" in lines[2]
    assert "version 3 abababababab, by Ada" in lines[-1]


def run(name: str, state: str, deployment: str | None = None) -> dict[str, Any]:
    return {"name": name, "state": state, "at": "2026-01-02T03:04:05Z", "deployment": deployment}


def shown(content: dict[str, Any]) -> str:
    file = io.StringIO()
    show(Console(file=file, width=200), content)
    return file.getvalue()


def test_a_run_that_waits_for_a_person_is_not_marked_crashed() -> None:
    trigger = trigger_of(crashed_without_heartbeat())
    assert {"prefect.flow-run.Suspended", "prefect.flow-run.Resuming", "prefect.flow-run.Completed"} <= trigger.expect


def trigger_of(automation: Automation) -> EventTrigger:
    assert isinstance(automation.trigger, EventTrigger)
    return automation.trigger


def event(name: str, message: str = "", flow: str = "lifecycle", queue: str = "ray") -> ReceivedEvent:
    """A change of a flow run's state as Prefect's server sends it."""
    related = [{"prefect.resource.id": "f", "prefect.resource.role": "flow", "prefect.resource.name": flow}]
    related += [{"prefect.resource.id": "q", "prefect.resource.role": "work-queue", "prefect.resource.name": queue}]
    resource = {"prefect.resource.id": "prefect.flow-run.1", "prefect.state-message": message}
    sent = {"occurred": "2026-01-02T03:04:05Z", "event": f"prefect.flow-run.{name}", "resource": resource}
    return ReceivedEvent.model_validate(sent | {"related": related, "id": UUID(int=1)})


def fires(automation: Automation, sent: ReceivedEvent) -> bool:
    """Whether Prefect's server counts the event for the automation."""
    trigger = trigger_of(automation).model_dump(mode="json")
    return ServerTrigger.model_validate(trigger).covers(sent)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (event("Failed"), ["a run failed"]),
        (event("Crashed"), ["a run failed"]),
        # The audit's own event and the failure of its run are one fault.
        (event("Failed", flow="audit"), ["a run failed"]),
        (event("Suspended", flow="promote"), ["a candidate waits for approval"]),
        (event("Suspended", message=STOPPED, flow="promote"), []),
        (event("Suspended", message=STOPPED), []),
        (event("Suspended", message=LOST, flow="promote"), []),
        (event("Resuming"), []),
        (event("Cancelled"), []),
    ],
)
def test_a_fault_is_told_once_and_a_planned_stop_never(sent: ReceivedEvent, told: list[str]) -> None:
    assert [each.name.removeprefix(PREFIX) for each in notifications(None) if fires(each, sent)] == told


def test_only_a_run_that_waits_for_another_says_so() -> None:
    assert fires(waiting_in_queue(), event("Late"))
    assert not fires(waiting_in_queue(), event("Late", queue="default"))
    assert not fires(waiting_in_queue(), event("Scheduled"))
