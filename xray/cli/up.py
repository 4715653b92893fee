"""`xray up`, `xray down` and `xray status`: the servers a team's runs need, on one machine; `xray doctor`."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from xray.cli.job import FAILED, INTERRUPTED
from xray.cli.options import AsJson
from xray.deployments.patience import NotUpError, end_of
from xray.deployments.server_home import ServerHome, State, check_host, find_server_home, new_state
from xray.deployments.servers import servers, start_missing, stop, worker
from xray.deployments.service import Service
from xray.deployments.status import service_status, show
from xray.deployments.suspension import resolve_lost_runs, resume, suspend
from xray_runtime.terminal import print_indented, say

Where = Annotated[
    Path | None, typer.Option(help="Server home: the directory of its files. Default: XRAY_HOME, else ~/.xray.")
]


def up(
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
    with _interruptible():
        _up(find_server_home(home), host, ports)


def down(home: Where = None) -> None:
    """Stop exactly what `xray up` started; runs at work are suspended, and the next `xray up` resumes them.

    Exit codes: 0 done, 2 bad input.
    """
    with _interruptible():
        found = find_server_home(home)
        state = found.load() if found.path.is_dir() else None
        if state is None:
            say(f"nothing was started in {found.path}")
            return
        with found.locked():
            prefect, *others = servers(found, state)
            runs = worker(found, state)
            if (process := runs.find()) is not None:
                # Kill the worker first: it would start the next run and mark suspended ones as crashed.
                process.kill()
                _suspend(_api(found, state), runs)
            # Clients stop before their servers.
            ended = stop(found, state, [runs, *reversed(others), prefect])
        say(f"stopped {', '.join(ended)}" if ended else "nothing was running")


def status(home: Where = None, as_json: AsJson = False) -> None:
    """Show which servers are up, which runs are running, suspended, waiting or next, and the champions.

    Exit codes: 0 everything is up, 1 something is not, 2 bad input.
    """
    server_home = find_server_home(home)
    content = service_status(server_home, server_home.load())
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        show(Console(), content)
    raise typer.Exit(0 if content["up"] else FAILED)


def doctor(
    output: Annotated[Path | None, typer.Option(help="Also look at this output directory.")] = None,
    home: Where = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with this installation: Python, disk, memory, libraries, GPU, ports, servers, results.

    Exit codes: 0 healthy, 1 something is wrong, 2 bad input.
    """
    from xray.deployments.doctor import diagnose

    found = diagnose(find_server_home(home), output)
    if as_json:
        print(json.dumps([{"name": name, "problems": problems} for name, problems in found.items()], indent=2))
    else:
        console = Console()
        for name, problems in found.items():
            for problem in problems or ("ok",):
                print_indented(console, f"{name:10}", problem)
    raise typer.Exit(FAILED if any(found.values()) else 0)


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
        lost = {} if is_working else {prefect.name: lambda: resolve_lost_runs(_api(home, state), state)}
        _start(home, state, [prefect, *others], lost)
        _install(home, state)
        if not is_working:
            assert prefect.record is not None
            if resumed := resume(_api(home, state), prefect.record.created):
                say(f"resumed: {', '.join(resumed)}")
        _start(home, state, [runs], {})
    variables = home.environment(state)
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        say(f"export {name}={variables[name]}")
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


def _suspend(api: str, runs: Service) -> None:
    try:
        suspended = suspend(api)
    except (OSError, ValueError):
        say("Prefect does not answer: runs are stopped, and continue after `xray up`")
        return
    if suspended:
        say(f"suspended: {', '.join(suspended)}; up to {runs.stop_s:.0f} s for snapshots; `xray up` resumes them")


def _api(home: ServerHome, state: State) -> str:
    return home.environment(state)["PREFECT_API_URL"]


def local_timezone(root: Path = Path("/")) -> str:
    """Name of this machine's time zone, such as Europe/Berlin; UTC if unknown."""
    named = os.environ.get("TZ", "").removeprefix(":")
    if named:
        return named
    target = str((root / "etc/localtime").resolve())
    return target.split("/zoneinfo/", 1)[1] if "/zoneinfo/" in target else "UTC"


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted; servers keep running: run the command again to continue, or stop them with `xray down`")
        raise typer.Exit(INTERRUPTED) from None
