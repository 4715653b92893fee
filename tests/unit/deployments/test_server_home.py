"""`xray up`'s memory and its refusals: state file, ports, hosts, other people's processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from xray.cli.commands.up import local_timezone
from xray.cli.main import app
from xray.deployments.patience import NotUpError
from xray.deployments.server_home import PORTS, ServerHome, State, check_free, check_host, find_server_home, new_state
from xray.deployments.servers import servers, start_missing, stop, worker
from xray.deployments.service import ProcessRecord, Service
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.processes import TAG


@pytest.fixture
def home(tmp_path: Path) -> ServerHome:
    found = ServerHome(tmp_path)
    (tmp_path / "logs").mkdir()
    return found


def me() -> ProcessRecord:
    return ProcessRecord.of(os.getpid())


def test_a_saved_state_loads_unchanged(home: ServerHome) -> None:
    assert home.load() is None
    state = State(tag="ab", ports=PORTS | {"ray": 7000}, started={"ray": me()})
    home.save(state)
    assert home.load() == state
    assert sorted(path.name for path in home.path.iterdir()) == ["logs", "state.json"]


@pytest.mark.parametrize("text", ["", "{", '{"tag": "a", "unknown": 1}', "[]"])
def test_a_damaged_state_is_one_line(home: ServerHome, text: str) -> None:
    (home.path / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"state.json: cannot be used \(it is damaged\)"):
        home.load()


def test_a_process_is_known_by_its_start_too() -> None:
    assert me().find() == psutil.Process()
    # The number was given to somebody else since.
    assert me().model_copy(update={"created": me().created - 60}).find() is None
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        created = psutil.Process(ended.pid).create_time()
        # Not yet waited for: a zombie is not up.
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert ProcessRecord(pid=ended.pid, created=created).find() is None


def test_ports_are_remembered_and_do_not_move_under_what_runs() -> None:
    first = new_state(None, None, {"prefect": 5001, "mlflow": None})
    assert first.ports == PORTS | {"prefect": 5001}
    assert new_state(first, None, {"ray": 6000}).ports == PORTS | {"prefect": 5001, "ray": 6000}
    running = first.model_copy(update={"started": {"ray": me()}})
    assert new_state(running, "127.0.0.1", {"ray": PORTS["ray"]}).ports == first.ports
    with pytest.raises(ConfigError, match=r"--ray-port: 6000 is not allowed while 6379 is in use: `xray down` first"):
        new_state(running, None, {"ray": 6000})
    with pytest.raises(ConfigError, match=r"--host: '0.0.0.0' is not allowed while the servers use '127.0.0.1'"):
        new_state(running, "0.0.0.0", {})


def test_one_port_for_two_services_is_refused() -> None:
    with pytest.raises(ConfigError, match="5000 is not allowed: mlflow has the same port"):
        new_state(None, None, {"prefect": 5000})


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7", "::", "example.org", "127.example.org", "127.0.0.1.evil"])
def test_others_need_a_password(host: str) -> None:
    with pytest.raises(ConfigError, match="not allowed without authentication: set PREFECT_SERVER_API_AUTH_STRING and"):
        check_host(host, {})
    check_host(host, {"PREFECT_SERVER_API_AUTH_STRING": "a:b", "PREFECT_API_AUTH_STRING": "a:b"})
    for no_password in ("a", "a:", ":b", ":"):
        with pytest.raises(ConfigError, match="set PREFECT_SERVER_API_AUTH_STRING to USER:PASSWORD"):
            check_host(host, {"PREFECT_SERVER_API_AUTH_STRING": no_password, "PREFECT_API_AUTH_STRING": "a:b"})
    with pytest.raises(ConfigError, match=r"is not allowed while .* differ"):
        check_host(host, {"PREFECT_SERVER_API_AUTH_STRING": "a:b", "PREFECT_API_AUTH_STRING": "a:c"})


def test_a_remembered_host_needs_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = ServerHome(tmp_path / "h")
    home.make()
    home.save(State(tag="ab", host="0.0.0.0"))
    for name in ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["up", "--home", str(home.path)])
    assert done.exit_code == 2
    assert "'0.0.0.0' is not allowed without authentication" in done.output


def test_environment_of_services(home: ServerHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the shell")
    home.make()
    found = home.environment(State(tag="ab", ports=PORTS | {"prefect": 4201}))
    assert "RAY_AUTH_TOKEN" not in found
    assert found["RAY_AUTH_TOKEN_PATH"] == str(home.path / "ray-token")
    assert "XRAY_SIGNING_KEY" not in os.environ
    key = Path(found["XRAY_SIGNING_KEY"])
    assert (key.parent, key.stat().st_mode & 0o777) == (home.path, 0o600)
    monkeypatch.setenv("XRAY_SIGNING_KEY", "of the shell")
    assert home.environment(State(tag="ab"))["XRAY_SIGNING_KEY"] == "of the shell"
    monkeypatch.delenv("XRAY_SIGNING_KEY")
    (home.output / "keys").mkdir(parents=True)
    (home.output / "keys" / "signing.pem").touch()
    home.make()
    # A key that was put there later is not used.
    assert home.environment(State(tag="ab"))["XRAY_SIGNING_KEY"] == str(key)
    assert found["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4201,http://localhost:4201"


def test_the_key_of_an_older_output_directory_stays(home: ServerHome) -> None:
    (home.output / "keys").mkdir(parents=True)
    (home.output / "keys" / "signing.pem").touch()
    home.make()
    assert "XRAY_SIGNING_KEY" not in home.environment(State(tag="ab"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_none(host: str) -> None:
    check_host(host, {})


def test_a_taken_port_is_refused_before_anything_starts(home: ServerHome) -> None:
    state = State(tag="cd")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--mlflow-port: {port} is not allowed: Address already in use on 127"):
            check_free("127.0.0.1", "--mlflow-port", port)
        state.ports = dict.fromkeys(PORTS, port)
        with pytest.raises(ConfigError, match="Address already in use"):
            start_missing(home, state, servers(home, state))
    assert state.started == {}
    assert home.load() is None


def test_down_ends_by_process_tag_and_nothing_else(home: ServerHome) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        subprocess.Popen(sleep, env=os.environ | {TAG: "test-of-down-worker"}) as ours,
        subprocess.Popen(sleep, env=os.environ | {TAG: "another"}) as theirs,
    ):
        # Its process id was recorded, but the system has given it to another process since.
        recorded = ProcessRecord(pid=theirs.pid, created=psutil.Process(theirs.pid).create_time() - 60)
        state = State(tag="test-of-down", started={"ray": recorded})
        assert stop(home, state, [worker(home, state), *servers(home, state)]) == ["worker"]
        assert ours.wait(60) != 0
        assert theirs.poll() is None
        theirs.kill()
    assert home.load() == State(tag="test-of-down")


def test_where_it_is(tmp_path: Path) -> None:
    assert find_server_home(Path("a"), {"XRAY_HOME": "/b"}).path == Path.cwd() / "a"
    assert find_server_home(None, {"XRAY_HOME": "/b"}).path == Path("/b")
    assert find_server_home(None, {}).path == Path.home() / ".xray"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not allowed: Not a directory"):
        ServerHome(tmp_path / "file").make()


def test_only_one_at_a_time_and_the_token_is_private(tmp_path: Path) -> None:
    home = ServerHome(tmp_path / "h")
    home.make()
    token = (home.path / "ray-token").read_text()
    home.make()
    assert (home.path / "ray-token").read_text() == token
    assert (home.path / "ray-token").stat().st_mode & 0o077 == 0
    with home.locked(), pytest.raises(ConfigError, match="another xray up or down is running"), home.locked():
        pass


def test_the_time_zone_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TZ", raising=False)
    assert local_timezone(tmp_path) == "UTC"
    zone = tmp_path / "usr/share/zoneinfo/Europe/Berlin"
    zone.parent.mkdir(parents=True)
    zone.touch()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/localtime").symlink_to(zone)
    assert local_timezone(tmp_path) == "Europe/Berlin"
    monkeypatch.setenv("TZ", ":Asia/Tokyo")
    assert local_timezone(tmp_path) == "Asia/Tokyo"


def service(home: ServerHome, code: str, *, healthy: bool, tag: str | None = "ef-ray") -> Service:
    return Service(
        "ray",
        "Thing",
        [sys.executable, "-c", code],
        os.environ | {"GREETING": "hello"} | ({TAG: tag} if tag else {}),
        home.log("ray"),
        "http://here",
        lambda _: healthy,
        tag=tag,
    )


def test_a_service_that_ends_says_why(home: ServerHome) -> None:
    """…with the end of its log; it had its variables, and was recorded before it could end."""
    state = State(tag="ef")
    thing = service(home, "import os, sys; sys.exit(os.environ['GREETING'] + ': no such disk')", healthy=False)
    assert start_missing(home, state, [thing]) == ["ray"]
    assert home.load() == state
    with pytest.raises(NotUpError, match=r"Thing ended right after it was started. The end of .*: hello: no such"):
        thing.wait_healthy()
    stop(home, state, [thing])


def test_a_service_that_does_nothing_is_an_error_that_names_its_log(
    home: ServerHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xray.deployments.patience.IDLE_SECONDS", 2.0)
    monkeypatch.setattr("xray.deployments.service.SAY_SECONDS", 0.1)
    thing, said = service(home, "import time; time.sleep(60)", healthy=False), list[str]()
    thing.start()
    with pytest.raises(NotUpError, match=r"Thing has done nothing for 2 s. Its log is .*ray.log, and empty"):
        thing.wait_healthy(said.append)
    assert said[0].startswith("still waiting for Thing")
    assert thing.stop()


@pytest.mark.parametrize(
    "work",
    ["while True: pass", "import time\nwhile True: print('.', flush=True); time.sleep(0.3)"],
    ids=["computes", "logs"],
)
def test_a_service_at_work_is_waited_for(home: ServerHome, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """…for longer than an idle one, however slow it is."""
    monkeypatch.setattr("xray.deployments.patience.IDLE_SECONDS", 1.0)
    thing, begin = service(home, work, healthy=False), time.monotonic()
    thing.health = lambda _: time.monotonic() - begin > 3
    thing.start()
    thing.wait_healthy()
    assert thing.stop()


def test_running_services_are_left_alone(home: ServerHome) -> None:
    state, said = State(tag="ef"), list[str]()
    thing = service(home, "import time; time.sleep(60)", healthy=True)
    assert start_missing(home, state, [thing]) == ["ray"]
    thing.wait_healthy(said.append)
    assert said == []
    before = state.started["ray"]
    assert start_missing(home, state, [thing]) == []
    os.kill(before.pid, signal.SIGKILL)
    os.waitpid(before.pid, 0)
    assert not thing.is_healthy()
    assert start_missing(home, state, [thing]) == ["ray"]
    assert state.started["ray"] != before
    assert stop(home, state, [thing]) == ["ray"]
    assert state.started == {}
    assert not home.ray_sessions(state).exists()


def test_without_a_tag_of_its_own_a_service_ends_alone(home: ServerHome) -> None:
    """Otherwise a run's server would end what else carries the tag of the run."""
    thing = service(home, "import time; time.sleep(60)", healthy=True, tag=None)
    other = service(home, "import time; time.sleep(60)", healthy=True, tag=None)
    thing.start()
    other.start()
    assert thing.stop()
    assert not thing.stop()
    assert thing.find() is None
    assert other.is_healthy()
    assert other.stop()
