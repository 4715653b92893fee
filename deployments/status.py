"""`xray status`: which services are up, which flow runs are running or next, what is champion."""

from __future__ import annotations

import contextlib
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xray.deployments.server_home import ServerHome, State
from xray.deployments.servers import ask, servers, worker
from xray_runtime.lineage.decisions import current
from xray_runtime.lineage.promotion import CHAMPION

STATES = ("RUNNING", "PENDING", "PAUSED", "CANCELLING")
MAX_RUNS = 50
MAX_NEXT = 5


def service_status(home: ServerHome, state: State | None) -> dict[str, Any]:
    """Everything `xray status --json` prints; `runs` and `next` are None where Prefect does not answer."""
    services = [*servers(home, state), worker(home, state)] if state is not None else []
    content: dict[str, Any] = {"home": str(home.path), "up": bool(services), "services": {}, "runs": None, "next": None}
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
            content["runs"] = _runs(api, {"type": {"any_": list(STATES)}}, "EXPECTED_START_TIME_DESC", MAX_RUNS)
            content["next"] = _runs(api, {"type": {"any_": ["SCHEDULED"]}}, "EXPECTED_START_TIME_ASC", MAX_NEXT)
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


def _runs(api: str, states: dict[str, Any], sort: str, limit: int) -> list[dict[str, Any]]:
    top_level = {"parent_task_run_id": {"is_null_": True}}
    query = {"flow_runs": {"state": states} | top_level, "sort": sort, "limit": limit}
    deployments = {found["id"]: found["name"] for found in ask(f"{api}/deployments/filter", {})}
    return [
        {
            "id": run["id"],
            "name": run["name"],
            "deployment": deployments.get(run["deployment_id"]),
            "state": run["state_name"],
            "at": run["start_time"] or run["expected_start_time"],
            "tags": run["tags"],
            "page": f"{api.removesuffix('/api')}/runs/flow-run/{run['id']}",
        }
        for run in ask(f"{api}/flow_runs/filter", query)
    ]


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
    for title, key in (("on", "runs"), ("next", "next")):
        for run in content[key] or []:
            # Until a run starts, its name is a random one.
            name = run["deployment"] if key == "next" else run["name"]
            table.add_row(title, run["state"], escape(name or run["name"]), f"{run['at'][:19].replace('T', ' ')} UTC")
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
