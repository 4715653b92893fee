"""`xray status`: which services are up, which flow runs are at work, suspended, waiting or next, what is champion."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xray.deployments.server_home import ServerHome, State
from xray.deployments.servers import ask, servers, worker
from xray.deployments.suspension import is_suspended
from xray_runtime.lineage.decisions import current
from xray_runtime.lineage.promotion import CHAMPION

STATES = ("RUNNING", "PENDING", "PAUSED", "CANCELLING")
MAX_RUNS = 50
TITLES = {"runs": "on", "suspended": "suspended", "waiting": "waiting", "next": "next"}
"""Kinds of flow runs in the content → their titles."""


def service_status(home: ServerHome, state: State | None) -> dict[str, Any]:
    """Everything `xray status --json` prints; where Prefect does not answer, the kinds of runs in TITLES are None."""
    services = [*servers(home, state), worker(home, state)] if state is not None else []
    content: dict[str, Any] = {"home": str(home.path), "up": bool(services), "services": {}} | dict.fromkeys(TITLES)
    for service in services:
        process = service.find()
        content["services"][service.name] = {
            "up": process is not None and service.is_healthy(),
            "pid": process.pid if process is not None else None,
            "address": service.address,
            "log": str(service.log),
        }
    content["up"] &= all(service["up"] for service in content["services"].values())
    if content["services"].get("prefect", {}).get("up"):
        assert state is not None
        api = home.environment(state)["PREFECT_API_URL"]
        with contextlib.suppress(OSError, ValueError):
            content |= _runs(api)
    content["champions"] = [
        {
            "name": name,
            "version": decision.version,
            "checkpoint": decision.checkpoint,
            "by": decision.by,
            "at": decision.at,
        }
        for (name, alias), decision in sorted(current(home.output).items())
        if alias == CHAMPION
    ]
    return content


def _runs(api: str) -> dict[str, list[dict[str, Any]]]:
    """The kinds of flow runs in TITLES, each as a list; of each deployment only the very next run."""
    deployments = {found["id"]: found["name"] for found in ask(f"{api}/deployments/filter", {})}
    top_level = {"parent_task_run_id": {"is_null_": True}}
    now = datetime.now(UTC).isoformat()

    def find(states: list[str], limit: int = MAX_RUNS, **more: Any) -> list[dict[str, Any]]:
        asked = {"state": {"type": {"any_": states}}} | top_level | more
        query = {"flow_runs": asked, "sort": "EXPECTED_START_TIME_ASC", "limit": limit}
        found: list[dict[str, Any]] = ask(f"{api}/flow_runs/filter", query)
        return found

    def next_run(deployment: str) -> list[dict[str, Any]]:
        return find(["SCHEDULED"], 1, deployment_id={"any_": [deployment]}, expected_start_time={"after_": now})

    def shown(run: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": run["id"],
            "name": run["name"],
            "deployment": deployments.get(run["deployment_id"]),
            "state": run["state_name"],
            "message": run["state"]["message"],
            "at": run["start_time"] or run["expected_start_time"],
            "tags": run["tags"],
            "page": f"{api.removesuffix('/api')}/runs/flow-run/{run['id']}",
        }

    at_work = find(list(STATES))
    kinds = {
        "runs": [run for run in at_work if not is_suspended(run)],
        "suspended": [run for run in at_work if is_suspended(run)],
        "waiting": find(["SCHEDULED"], expected_start_time={"before_": now}),
        "next": sorted(
            (run for deployment in deployments for run in next_run(deployment)),
            key=lambda run: run["expected_start_time"],
        ),
    }
    return {kind: [shown(run) for run in runs] for kind, runs in kinds.items()}


def show(console: Console, content: dict[str, Any]) -> None:
    """The same for people."""
    if not content["services"]:
        console.print(f"nothing was started in {content['home']}: `xray up`", highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, service in content["services"].items():
        word = (
            "[green]up[/green]"
            if service["up"]
            else "[red]does not answer[/red]"
            if service["pid"]
            else "[red]down[/red]"
        )
        table.add_row(name, word, escape(service["address"]), str(service["pid"] or f"see logs/{name}.log"))
    ahead = ", ".join(run["name"] for run in content["runs"] or [])
    for kind, title in TITLES.items():
        for run in content[kind] or []:
            # Until a run starts, its name is a random one.
            name = run["deployment"] if kind in ("waiting", "next") else run["name"]
            at = f"{run['at'][:19].replace('T', ' ')} UTC"
            behind = f", behind {ahead}" if kind == "waiting" and ahead else ""
            table.add_row(title, run["state"], escape(name or run["name"]), escape(at + behind))
    if content["services"] and content["runs"] is None:
        table.add_row("on", "", "not known: Prefect does not answer", "")
    for champion in content["champions"]:
        words = (
            f"version {champion['version']} {champion['checkpoint'][:12]}, by {champion['by']} at {champion['at'][:19]}"
        )
        table.add_row("champion", "", escape(champion["name"]), escape(words))
    if not content["champions"]:
        table.add_row("champion", "", "none yet", "")
    console.print(table, soft_wrap=True)
