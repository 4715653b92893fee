"""`xray up` as a team uses it: at a terminal, through Prefect's API, and in a browser on its pages and MLflow's.

All of it happens on one installation, in this order; the first lifecycle, started by a schedule, serves every test.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.e2e.conftest import xray
from tests.e2e.operator import LONG, Operator
from tests.e2e.pages import CHROMIUM, Pages, find_chromium, open_browser
from tests.e2e.serving import ask, serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(2000)]

STAGES = ["base", "evaluate", "ppo-1", "ppo-2", "preferences", "prepare", "reward", "sft"]


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    found = Operator(tmp_path_factory.mktemp("up") / "home")
    try:
        found.up()
        yield found
    finally:
        down = found.xray("down")
    assert down.code == 0, down.err
    assert found.left() == []
    assert not found.status()["up"]


@pytest.fixture(scope="module")
def scheduled(operator: Operator) -> str:
    """A lifecycle that a schedule started, by its id."""
    schedule = {"interval": 15, "anchor_date": datetime.now(UTC).isoformat()}
    return operator.scheduled("lifecycle/lifecycle-tiny", schedule)


@pytest.fixture(scope="module")
def pages(operator: Operator) -> Iterator[Pages]:
    if find_chromium() is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is installed")
    expect.set_options(timeout=LONG * 1000)
    with sync_playwright() as playwright, open_browser(playwright) as browser:
        found = Pages(browser, operator.prefect)
        yield found
        # Nor did any page look elsewhere.
        assert found.asked - {None} == {"127.0.0.1"}


def test_dead_services_restart_while_a_lifecycle_runs(operator: Operator, scheduled: str) -> None:
    first = operator.pids()
    nightly = operator.ask("deployments/name/lifecycle/lifecycle")
    assert [schedule["schedule"]["cron"] for schedule in nightly["schedules"]] == ["0 2 * * *"]
    installed = {automation["name"] for automation in operator.ask("automations/filter", {})}
    assert "X-ray: mark a flow run Crashed when its process is gone" in installed
    assert len(installed) == 4

    lost = operator.start("audit/audit", {"output": "/nowhere"})
    operator.up()
    assert operator.pids() == first
    assert operator.ended(lost)["state_name"] == "Failed"
    # A lifecycle goes on without the worker that started it.
    operator.until(lambda: (operator.home / "output" / "logs" / "lifecycle.log").exists(), "no lifecycle began")
    os.kill(first["worker"], signal.SIGKILL)
    assert not operator.status()["up"]
    operator.up()
    repaired = operator.pids()
    assert repaired.pop("worker") != first.pop("worker")
    assert repaired == first
    operator.until(lambda: bool(operator.notifications), "nobody is told of the run that failed")
    (told,) = operator.notifications
    assert told.startswith("audit /nowhere failed: ")
    assert told.endswith(f"/runs/flow-run/{lost}")
    assert "\n" not in told

    status = operator.status()
    assert status["up"]
    assert {name for name, service in status["services"].items() if service["up"]} == {*first, "worker"}
    assert status["champions"] == []
    assert "audit" in {run["deployment"] for run in status["next"]}


def test_a_scheduled_run_ends_and_leads_to_mlflow_and_back(operator: Operator, scheduled: str) -> None:
    done = operator.ended(scheduled)
    assert (done["state_name"], done["name"]) == ("Completed", "xray-tiny seed 0"), done["state"]
    assert done["auto_scheduled"]
    assert operator.tasks(scheduled) == dict.fromkeys([*STAGES, "register"], "Completed")
    shown = operator.artifacts(scheduled)
    assert set(shown) == {*STAGES, "lifecycle", "mlflow", "lineage"}
    assert "| reward/mean |" in shown["ppo-2"]
    assert "```mermaid" in shown["lineage"]
    assert "rewards.0: reward" in shown["lineage"]
    lines = operator.logs(scheduled)
    for stage in STAGES:
        assert [line for line in lines if line.startswith(f"{stage}: done in ")], (stage, lines)
    assert any(line.startswith("sft: done in ") and ", loss " in line for line in lines)
    record = json.loads((operator.home / "output" / "lifecycle.json").read_text())
    assert f"/runs/{record['run_id']}" in shown["mlflow"]
    with urllib.request.urlopen(f"{operator.mlflow}/api/2.0/mlflow/runs/get?run_id={record['run_id']}") as answer:
        tags = {tag["key"]: tag["value"] for tag in json.load(answer)["run"]["data"]["tags"]}
    assert tags["prefect.flow_run"].endswith(f"/runs/flow-run/{scheduled}")


def test_a_schedule_is_seen(pages: Pages) -> None:
    pages.deployment("lifecycle")
    window = pages.window
    expect(window.get_by_text("nightly", exact=True)).to_be_visible()
    expect(window.get_by_role("switch")).to_be_checked()
    expect(window.get_by_text("02:00:00 AM")).to_be_visible()
    pages.picture("schedule")


@pytest.fixture(scope="module")
def waiting(operator: Operator, scheduled: str, pages: Pages) -> str:
    """A promotion that waits for somebody's word on what the scheduled run made."""
    operator.ended(scheduled)
    pages.form("promote")
    pages.fill("name", "xray-tiny-policy")
    # The smallest lifecycle learns next to nothing.
    pages.field("gates (Optional)").get_by_role("button", name="PromotionConfig").click()
    pages.field("Min Win Rate (Optional)").get_by_role("button", name="None").click()
    pages.field("Max Judge Drop (Optional)").get_by_role("button", name="None").click()
    run = pages.submit()
    pages.run(run)
    pages.shows("Suspended")
    return run


@pytest.fixture(scope="module")
def retried(operator: Operator, scheduled: str, waiting: str, pages: Pages) -> str:
    """A copy of the scheduled run with a longer second PPO stage, lost in it and retried on its page."""
    pages.copy(scheduled)
    pages.fill("iterations (Optional)", "40", nth=1)
    run = pages.submit()
    pages.run(run)
    pages.shows("Running")
    operator.until(lambda: "ppo-2" in operator.artifacts(run), "ppo-2 says nothing")
    snapshots = operator.home / "output" / "snapshots"
    operator.until(lambda: any(snapshots.glob("ppo-2-*/step-??????????")), "ppo-2 makes no snapshot")
    pages.picture("run")
    operator.kill(run)
    pages.shows("Crashed")
    pages.retry()
    pages.shows("Completed")
    return run


def test_a_retried_run_goes_on_from_its_snapshot(operator: Operator, retried: str) -> None:
    # What the length of the second PPO stage does not change is not computed, what was done before the loss not again.
    assert operator.computed(retried) == {"ppo-2", "evaluate", "register"}
    states = operator.ask(f"flow_run_states/?flow_run_id={retried}")
    (lost,) = (datetime.fromisoformat(s["timestamp"]).timestamp() for s in states if s["name"] == "Crashed")
    stages = json.loads((operator.home / "output" / "lifecycle.json").read_text())["stages"]
    (key,) = (stage["key"] for stage in stages if stage["name"] == "ppo-2")
    lines = (operator.home / "output" / "records" / f"ppo-2-{key[:12]}" / "metrics.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    assert points[0]["time_ms"] < lost * 1000 < points[-1]["time_ms"]


def test_links_lead_from_a_run_to_its_models_and_back(operator: Operator, retried: str, pages: Pages) -> None:
    summary = pages.summary(operator.artifact_id(retried, "ppo-2"))
    expect(summary.get_by_role("cell", name="reward/mean", exact=True)).to_be_visible()
    assert summary.get_by_role("img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    summary.get_by_role("img").scroll_into_view_if_needed()
    pages.picture("summary")

    mlflow = pages.follow(summary.get_by_role("link", name="Its run in MLflow"))
    expect(mlflow.get_by_role("heading", name="ppo-2")).to_be_visible()
    for parent in ("prepare", "sft", "reward", "ppo-1"):
        expect(mlflow.get_by_role("link", name=f"xray-tiny-{parent}").first).to_be_visible()
    pages.picture("mlflow", mlflow)
    mlflow.get_by_role("link", name="xray-tiny-policy").first.click()
    expect(mlflow.get_by_text("xray.sha256")).to_be_visible()
    expect(mlflow.get_by_text("candidate").first).to_be_visible()
    mlflow.get_by_role("link", name="ppo-2", exact=True).click()
    mlflow.get_by_role("link", name="xray-tiny seed 0").click()
    back = mlflow.get_by_role("link", name="Prefect flow run")
    assert back.get_attribute("href") == f"{operator.prefect}/runs/flow-run/{retried}"
    mlflow.close()


def test_a_candidate_is_approved_on_its_page(operator: Operator, waiting: str, retried: str, pages: Pages) -> None:
    """The candidate has become another while the promotion waited: nobody's word holds for what they did not see."""
    operator.until(lambda: any("waits for approval" in text for text in operator.notifications), "no one is notified")
    pages.run(waiting)
    first = operator.asked(waiting)
    pages.approve("Promote version 1 of")
    operator.until(lambda: operator.asked(waiting) not in (None, first), "nobody is asked about the new candidate")
    assert operator.status()["champions"] == []
    pages.run(waiting)
    pages.approve("Promote version 2 of")
    pages.shows("Completed")
    (champion,) = operator.status()["champions"]
    assert (champion["name"], champion["version"], champion["by"]) == ("xray-tiny-policy", "2", "Ada")
    expect(pages.artifact("promotion").get_by_text("Ada promoted it")).to_be_visible()


def test_down_suspends_a_run_at_work_and_up_lets_it_go_on(operator: Operator, pages: Pages, tmp_path: Path) -> None:
    """By itself, without an alarm, and to the same bytes as a run that nothing interrupts."""
    parameters = operator.ask("deployments/name/lifecycle/lifecycle-tiny")["parameters"]
    config = parameters["config"] | {"seed": 1}
    config["ppo"]["stages"][1]["iterations"] = 150
    run, told = operator.start("lifecycle/lifecycle-tiny", parameters | {"config": config}), len(operator.notifications)
    pages.run(run)
    operator.until(lambda: "ppo-2" in operator.artifacts(run), "ppo-2 does not begin")
    pages.picture("before-down")
    down = operator.xray("down")
    assert down.code == 0, down.err
    assert "suspended: xray-tiny seed 1" in down.out
    assert operator.left() == []
    assert "nothing was running" in operator.xray("down").out

    up = operator.up()
    assert "resumed: xray-tiny seed 1" in up
    pages.run(run)
    pages.shows("Completed")
    pages.picture("after-up")
    states = [state["name"] for state in operator.ask(f"flow_run_states/?flow_run_id={run}")]
    assert [state for state in states if state in ("Suspended", "Resuming")] == ["Suspended", "Resuming"]
    assert not {"Crashed", "Failed", "AwaitingRetry"} & set(states)
    assert operator.notifications[told:] == []
    assert len(operator.artifact_keys(run)) == len(set(operator.artifact_keys(run)))

    calm = operator.start("lifecycle/lifecycle-tiny", {"config": config, "output": str(tmp_path)})
    assert operator.ended(calm)["state_name"] == "Completed"
    assert checkpoints(operator.home / "output") == checkpoints(tmp_path)


def checkpoints(output: Path) -> dict[str, str]:
    stages = json.loads((output / "lifecycle.json").read_text())["stages"]
    return {stage["name"]: stage["checkpoint"]["sha256"] for stage in stages}


def test_a_stage_asks_a_person_and_gets_the_answer(operator: Operator, scheduled: str) -> None:
    """From its Ray worker, on the page of its run; the run is lost before anybody answers, and the question stands."""
    operator.ended(scheduled)
    parameters = operator.ask("deployments/name/lifecycle/lifecycle-tiny")["parameters"]
    # Whatever moves is a sign.
    bounds = {"max_length_ratio": 1.000001, "min_distinct_ratio": 0.999999, "max_kl_per_token": 1e-9}
    parameters["config"]["ppo"]["stages"][0]["watch"] = {"action": "pause", "window": 1} | bounds
    run = operator.start("lifecycle/lifecycle-tiny", parameters)
    operator.until(lambda: operator.asked(run) is not None, "nobody is asked")
    assert operator.ask(f"flow_runs/{run}")["state_type"] == "PAUSED"
    assert "may be learning to please its reward alone" in operator.artifacts(run)["xray-ppo-1-review"]
    operator.kill(run)
    operator.until(lambda: operator.ask(f"flow_runs/{run}")["state_type"] == "CRASHED", "nobody sees that it is lost")

    def retried() -> bool:
        # Prefect's worker and its runner both report the loss; the later report undoes a retry asked for in between.
        operator.ask(f"flow_runs/{run}/set_state", {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}})
        return str(operator.ask(f"flow_runs/{run}")["state_type"]) != "CRASHED"

    operator.until(retried, "it cannot be retried")

    answer = {"decision": "go on", "name": "Ada", "note": "It moves as it should."}
    answered = set[str]()

    def done() -> bool:
        asked = operator.asked(run)
        if asked is not None and asked not in answered:
            operator.ask(f"flow_runs/{run}/resume", {"run_input": answer})
            answered.add(asked)
        return operator.ask(f"flow_runs/{run}")["state_type"] in ("COMPLETED", "FAILED", "CRASHED")

    operator.until(done, "it does not go on")
    assert operator.ask(f"flow_runs/{run}")["state_type"] == "COMPLETED"
    assert answered
    stages = json.loads((operator.home / "output" / "lifecycle.json").read_text())["stages"]
    (key,) = (stage["key"] for stage in stages if stage["name"] == "ppo-1")
    watched = json.loads((operator.home / "output" / "checkpoints" / f"ppo-1-{key[:12]}" / "watch.json").read_text())
    assert not watched["ended_early"]
    assert {(seen["by"], seen["note"], seen["go_on"]) for seen in watched["seen"]} == {
        ("Ada", "It moves as it should.", True)
    }


def test_a_search_runs_like_a_lifecycle_and_its_best_is_served(operator: Operator, scheduled: str) -> None:
    """The last step at a terminal, with the variables that `up` printed."""
    operator.ended(scheduled)
    parameters = operator.ask("deployments/name/lifecycle/lifecycle-tiny")["parameters"]
    fields = {"ppo.stages.1.lr": {"low": 1e-5, "high": 1e-3, "log": True}}
    search = {"name": "rates", "fields": fields, "metric": "evaluate/gold_delta", "trials": 2}
    run = operator.start("tune/tune", parameters | {"search": search})
    assert operator.ended(run)["state_name"] == "Completed"
    assert "search" in operator.artifacts(run)
    directory = operator.home / "output" / "searches" / "rates"
    results = json.loads((directory / "results.json").read_text())
    assert [trial["state"] for trial in results["trials"]] == ["finished"] * 2
    for trial in results["trials"]:
        stages = json.loads((Path(trial["directory"]) / "lifecycle.json").read_text())["stages"]
        assert [stage["name"] for stage in stages if not stage["cached"]] == ["ppo-2", "evaluate"]

    output = str(operator.home / "output")
    best = xray("run", str(directory / "best.yaml"), "--output", output, "--json", variables=operator.variables)
    assert best.code == 0, best.err
    assert all(stage["cached"] for stage in best.lifecycle["stages"])
    (policy,) = (stage["checkpoint"]["sha256"] for stage in best.lifecycle["stages"] if stage["name"] == "ppo-2")
    assert best.lifecycle["registered"]["alias"] == "candidate"
    with serving(operator.home / "output", policy, operator.variables) as server:
        assert ask(server.address)[0] == policy
    assert server.code == 0, server.log.read_text()
    assert operator.status()["up"]


def test_prune_lists_what_it_would_remove(operator: Operator, scheduled: str, pages: Pages) -> None:
    operator.ended(scheduled)
    before = sorted((operator.home / "output" / "checkpoints").iterdir())
    pages.form("prune")
    pages.run(pages.submit())
    pages.shows("Completed")
    expect(pages.artifact("prune").get_by_text("would go")).to_be_visible()
    assert sorted((operator.home / "output" / "checkpoints").iterdir()) == before
