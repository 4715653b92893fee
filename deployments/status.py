"""`xray status`: services, flow runs (running, suspended, waiting, next) and champions."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xray.deployments.server_home import ServerHome, State
from xray.deployments.servers import ask, servers, worker
from xray.deployments.suspension import ACTIVE, is_suspended
from xray_runtime.kernel.evidence.kinds.canary import Canaries
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.reference import CHAMPION
from xray_runtime.live.canary import summary

MAX_RUNS = 50
TITLES = {"runs": "on", "suspended": "suspended", "waiting": "waiting", "next": "next"}
"""Group of flow runs → its title."""


def service_status(home: ServerHome, state: State | None) -> dict[str, Any]:
    """The content of `xray status --json`; the groups of TITLES are None if Prefect does not answer."""
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
        {"name": name} | decision.model_dump(include={"version", "checkpoint", "by", "at"})
        for (name, alias), decision in sorted(view(home.output).decided.items())
        if alias == CHAMPION
    ]
    content["canaries"] = [
        {"name": canary.began.name, "candidate": canary.began.candidate, "summary": summary(canary)}
        for canary in list(view(home.output).state(Canaries).values())[-1:]
    ]
    return content


def _runs(api: str) -> dict[str, list[dict[str, Any]]]:
    """Group of TITLES → its flow runs; `next` has one run of each deployment."""
    deployments = {found["id"]: found["name"] for found in ask(f"{api}/deployments/filter", {})}
    top_level = {"parent_task_run_id": {"is_null_": True}}
    now = datetime.now(UTC).isoformat()

    def find(states: list[str], limit: int = MAX_RUNS, **more: Any) -> list[dict[str, Any]]:
        wanted = {"state": {"type": {"any_": states}}} | top_level | more
        query = {"flow_runs": wanted, "sort": "EXPECTED_START_TIME_ASC", "limit": limit}
        runs: list[dict[str, Any]] = ask(f"{api}/flow_runs/filter", query)
        return runs

    def next_run(deployment: str) -> list[dict[str, Any]]:
        return find(["SCHEDULED"], 1, deployment_id={"any_": [deployment]}, expected_start_time={"after_": now})

    def summary(run: dict[str, Any]) -> dict[str, Any]:
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

    active = find(list(ACTIVE))
    groups = {
        "runs": [run for run in active if not is_suspended(run)],
        "suspended": [run for run in active if is_suspended(run)],
        "waiting": find(["SCHEDULED"], expected_start_time={"before_": now}),
        "next": sorted(
            (run for deployment in deployments for run in next_run(deployment)),
            key=lambda run: run["expected_start_time"],
        ),
    }
    return {group: [summary(run) for run in runs] for group, runs in groups.items()}


def show(console: Console, content: dict[str, Any]) -> None:
    if not content["services"]:
        console.print(f"nothing was started in {content['home']}: run `xray up`", highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, service in content["services"].items():
        state = "down" if not service["pid"] else "up" if service["up"] else "does not answer"
        color = "green" if service["up"] else "red"
        table.add_row(
            name,
            f"[{color}]{state}[/{color}]",
            escape(service["address"]),
            str(service["pid"] or f"see logs/{name}.log"),
        )
    ahead = ", ".join(run["name"] for run in content["runs"] or [])
    for kind, title in TITLES.items():
        for run in content[kind] or []:
            # Before it starts, a run has a random name.
            name = run["deployment"] if kind in ("waiting", "next") else run["name"]
            at = f"{run['at'][:19].replace('T', ' ')} UTC"
            behind = f", behind {ahead}" if kind == "waiting" and ahead else ""
            table.add_row(title, run["state"], escape(name or run["name"]), escape(at + behind))
    if content["services"] and content["runs"] is None:
        table.add_row("on", "", "not known: Prefect does not answer", "")
    for champion in content["champions"]:
        version = f"version {champion['version']} {champion['checkpoint'][:12]}"
        decided = f"{version}, by {champion['by']} at {champion['at'][:19]}"
        table.add_row("champion", "", escape(champion["name"]), escape(decided))
    for canary in content["canaries"]:
        text = f"{canary['candidate'][:12]} {canary['summary']}"
        table.add_row("canary", "", escape(canary["name"]), escape(text))
    if not content["champions"]:
        table.add_row("champion", "", "none yet", "")
    console.print(table, soft_wrap=True)
