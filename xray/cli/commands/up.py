"""`xray up`: the servers a team's runs need, on one machine."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from xray.cli.server_commands import Where, interruptible, prefect_api
from xray.deployments.patience import NotUpError, end_of
from xray.deployments.server_home import ServerHome, State, check_host, find_server_home, new_state
from xray.deployments.servers import servers, start_missing, worker
from xray.deployments.service import Service
from xray.deployments.suspension import resolve_lost_runs, resume
from xray_runtime.kernel.terminal import say
from xray_runtime.trust.signing import KEY_VARIABLE

PANEL = "Servers"


def command(
    home: Where = None,
    host: Annotated[
        str | None, typer.Option(help="Address Prefect listens on; other than loopback needs a password.")
    ] = None,
    prefect_port: Annotated[int | None, typer.Option(min=1024, max=65535, help="Default: 4200.")] = None,
    mlflow_port: Annotated[int | None, typer.Option(min=1024, max=65535, help="Default: 5000.")] = None,
    ray_port: Annotated[int | None, typer.Option(min=1024, max=65535, help="Default: 6379.")] = None,
    dashboard_port: Annotated[int | None, typer.Option(min=1024, max=65535, help="Ray's pages. Default: 8265.")] = None,
) -> None:
    """Start what is missing: Prefect, MLflow, Ray, a worker; deployments, schedules, automations. Safe to repeat.

    Hosts and ports are remembered. Exit codes: 0 everything is up, 1 something is not, 2 bad input.
    """
    ports = {"prefect": prefect_port, "mlflow": mlflow_port, "ray": ray_port, "dashboard": dashboard_port}
    with interruptible():
        _up(find_server_home(home), host, ports)


def _up(home: ServerHome, host: str | None, ports: dict[str, int | None]) -> None:
    home.make()
    with home.locked():
        state = new_state(home.load(), host, ports)
        check_host(state.host)
        home.save(state)
        runs = worker(home, state)
        prefect, *others = servers(home, state)
        is_working = runs.find() is not None
        # This must precede Prefect's own check for runs without a process.
        lost = {} if is_working else {prefect.name: lambda: resolve_lost_runs(prefect_api(home, state), state)}
        _start(home, state, [prefect, *others], lost)
        _install(home, state)
        if not is_working:
            assert prefect.record is not None
            if resumed := resume(prefect_api(home, state), prefect.record.created):
                say(f"resumed: {', '.join(resumed)}")
        _start(home, state, [runs], {})
    variables = home.environment(state)
    shown = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
    for name in (*shown, KEY_VARIABLE):
        if name in variables:
            say(f"export {name}={variables[name]}")
    if KEY_VARIABLE not in variables:
        rotate = f"xray keys rotate --output {home.output} --new-key {home.path / 'signing.pem'} --note REASON"
        say(f"the signing key lies in the directory that it signs: `{rotate}`, then `xray up` again")
    for name, database in state.databases.items():
        say(f"{name:8} keeps its records in PostgreSQL at {database}")
    say(f"output   {home.output}")


def _start(home: ServerHome, state: State, services: list[Service], after: Mapping[str, Callable[[], None]]) -> None:
    """Start missing `services` and wait until all are healthy; call `after[name]` once that service is."""
    started = start_missing(home, state, services)
    if running := [service.title for service in services if service.name not in started]:
        say(f"already running: {', '.join(running)}")
    if started:
        say(f"starting {', '.join(service.title for service in services if service.name in started)}")
    ended: queue.SimpleQueue[tuple[Service, BaseException | None]] = queue.SimpleQueue()

    def wait(service: Service) -> None:
        try:
            service.wait_healthy(say)
            ended.put((service, None))
        except BaseException as error:
            ended.put((service, error))

    for service in services:
        threading.Thread(target=wait, args=(service,), daemon=True).start()
    for _ in services:
        service, error = ended.get()
        if error is not None:
            raise error
        if service.name in after:
            after[service.name]()
        say(f"{service.title:8} {service.address}")


def _install(home: ServerHome, state: State) -> None:
    """Install deployments and automations in a new process: Prefect reads its address when it is imported."""
    log = home.log("install")
    environment = home.environment(state) | {"XRAY_TIMEZONE": local_timezone()}
    with log.open("ab") as file:
        command = [sys.executable, "-m", "xray.deployments.installation"]
        done = subprocess.run(
            command, cwd=home.path, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    if done.returncode:
        raise NotUpError(f"Prefect refused the deployments. {end_of(log)}")
    say("deployments, schedules and automations are in place")


def local_timezone(root: Path = Path("/")) -> str:
    """Name of this machine's time zone, such as Europe/Berlin; UTC if unknown."""
    named = os.environ.get("TZ", "").removeprefix(":")
    if named:
        return named
    target = str((root / "etc/localtime").resolve())
    return target.split("/zoneinfo/", 1)[1] if "/zoneinfo/" in target else "UTC"
