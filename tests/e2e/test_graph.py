"""Graphs of people's own, through the real command: side by side, killed, resumed, isolated."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.e2e.conftest import ROOT, XRAY, Outcome, edges, environment, to_compute, xray
from tests.e2e.pages import CHROMIUM, Pages, find_chromium, open_browser
from tests.e2e.ray_nodes import Cluster
from tests.waiting import wait_until
from xray.deployments.local_services import PREFECT_SERVER
from xray.deployments.service import answers, free_port

JUDGES = ("upbeat-judge", "interesting-judge")
SMALL = ["--set", "steps=10", "--set", "iterations=2"]


def two_judges(output: Path, *more: str) -> Outcome:
    return xray("run", "examples.two_judges:two_judges", "--output", str(output), "--json", *SMALL, *more)


def shas(outcome: Outcome) -> dict[str, str]:
    return {stage["name"]: stage["checkpoint"]["sha256"] for stage in outcome.lifecycle["stages"]}


def spans(output: Path) -> dict[str, list[tuple[datetime, datetime]]]:
    """Task → (start, end) of its runs, in Prefect's own record."""
    found: dict[str, list[tuple[datetime, datetime]]] = {}
    with contextlib.closing(sqlite3.connect(output / "prefect" / "prefect.db")) as database:
        rows = database.execute("select name, start_time, end_time from task_run where end_time is not null")
        for name, start, end in rows:
            found.setdefault(name, []).append((datetime.fromisoformat(start), datetime.fromisoformat(end)))
    return found


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """An undisturbed run of examples/two_judges.py."""
    output = tmp_path_factory.mktemp("judges") / "run"
    outcome = two_judges(output)
    assert outcome.code == 0, outcome.err
    return output, outcome


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_independent_branches_run_at_the_same_time_and_show_their_edges(judged: tuple[Path, Outcome]) -> None:
    output, outcome = judged
    assert {*JUDGES} <= shas(outcome).keys()
    found = spans(output)
    [(first_start, first_end)], [(second_start, second_end)] = (found[name] for name in JUDGES)
    assert max(first_start, second_start) < min(first_end, second_end)
    parents = {"sft": {"fresh_base", "prepare"}}
    parents |= {f"{name}-judge": {"sft", f"{name}-pairs"} for name in ("upbeat", "interesting")}
    for stage, expected in parents.items():
        assert {parent for parent, child in edges(output) if child == stage} == expected


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_of_the_run_draws_the_edges(judged: tuple[Path, Outcome], tmp_path: Path) -> None:
    """In a browser, on Prefect's own page over the database of a finished run."""
    if find_chromium() is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)}")
    output, outcome = judged
    assert outcome.lifecycle["registered"]["name"] == "two-judges-policy"
    home, port = tmp_path / "prefect", free_port()
    shutil.copytree(output / "prefect", home)
    variables = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_UI_STATIC_DIRECTORY": str(home / "ui"),
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }
    address = f"http://127.0.0.1:{port}"
    variables["PREFECT_API_URL"] = f"{address}/api"  # where the page asks
    server = subprocess.Popen([*PREFECT_SERVER, f"--port={port}"], env=environment() | variables)
    run = outcome.lifecycle["flow_run_id"]
    try:
        wait_until(lambda: answers(f"{address}/api/health"), seconds=600, process=server)
        with sync_playwright() as playwright, open_browser(playwright) as browser:
            pages = Pages(browser, address)
            with pages.window.expect_response(lambda answer: f"{run}/graph-v2" in answer.url) as answer:
                pages.run(run)
            nodes = dict(answer.value.json()["nodes"])
            drawn = {(nodes[p["id"]]["label"], n["label"]) for n in nodes.values() for p in n["parents"]}
            assert {(judge, "ppo") for judge in JUDGES} | {("sft", judge) for judge in JUDGES} <= drawn
            pages.shows("Completed")
            # The graph is laid out and zoomed while one looks.
            pages.window.wait_for_timeout(3000)
            pages.picture("two-judges")
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
def test_a_users_project_runs_is_cached_and_audited(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "own_project", project)
    output = project / "runs" / "short-replies"

    def run(*more: str) -> Outcome:
        command = [XRAY, "run", "flows.short_replies:short_replies", "--json", *more]
        done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True, timeout=900)
        return Outcome(done.returncode, done.stdout, done.stderr)

    first = run()
    assert first.code == 0, first.err
    kinds = {stage["name"]: stage["kind"] for stage in first.lifecycle["stages"]}
    assert kinds["keep_shortest"] == "keep_shortest"
    assert xray("audit", "--all", "--output", str(output)).code == 0
    drawn = xray("lineage", "sft-short", "--output", str(output))
    assert "keep_shortest" in drawn.out
    # Again nothing would be computed, and after an edit of its code what depends on it alone.
    assert to_compute(run("--explain")) == []
    file = project / "tasks" / "keep_shortest.py"
    file.write_text(file.read_text().replace("max(1, round(", "max(2, round("))
    assert to_compute(run("--explain")) == ["keep_shortest", "sft-short", "evaluate"]


@pytest.fixture
def shared_ray(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment variables that name a Ray of two nodes."""
    cluster = Cluster(tmp_path)
    try:
        cluster.begin()
        cluster.join("a")
        yield cluster.variables
    finally:
        cluster.end()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_interrupting_one_of_two_lifecycles_leaves_the_other_unchanged(
    first: Outcome, shared_ray: dict[str, str], tmp_path: Path
) -> None:
    variables = environment() | shared_ray

    def start(name: str, seed: int) -> subprocess.Popen[str]:
        output = ["--output", str(tmp_path / name), "--json"]
        command = [XRAY, "run", "configs/tiny.yaml", *output, "--set", f"seed={seed}"]
        return subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    stays, goes = start("stays", 0), start("goes", 1)
    wait_until((tmp_path / "goes" / "logs" / "sft" / "policy-0.log").exists, seconds=600, process=goes)
    goes.send_signal(signal.SIGINT)
    assert goes.wait(300) == 130
    out, _ = stays.communicate(timeout=900)
    assert stays.returncode == 0
    assert shas(Outcome(0, out, "")) == shas(first)
