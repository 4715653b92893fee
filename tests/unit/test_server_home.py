"""`xray up`'s memory and its refusals: state file, ports, hosts, other people's processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from xray.cli.main import app
from xray.cli.up import local_timezone
from xray.deployments.server_home import (
    PORTS,
    ProcessRecord,
    ServerHome,
    State,
    check_free,
    check_host,
    find_server_home,
    new_state,
)
from xray.deployments.servers import NotUpError, Service, servers, start_missing, stop, wait_healthy, worker
from xray_runtime.config.validation import ConfigError


@pytest.fixture
def home(tmp_path: Path) -> ServerHome:
    found = ServerHome(tmp_path)
    (tmp_path / "logs").mkdir()
    return found


def me() -> ProcessRecord:
    return ProcessRecord(pid=os.getpid(), created=psutil.Process().create_time())


def test_what_is_remembered_comes_back_whole(home: ServerHome) -> None:
    assert home.load() is None
    state = State(mark="ab", ports=PORTS | {"ray": 7000}, started={"ray": me()})
    home.save(state)
    assert home.load() == state
    assert sorted(path.name for path in home.path.iterdir()) == ["logs", "state.json"]


@pytest.mark.parametrize("text", ["", "{", '{"mark": "a", "unknown": 1}', "[]"])
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
    with pytest.raises(ConfigError, match=r"--ray-port: 6000 is not allowed while it is up on 6379: `xray down` first"):
        new_state(running, None, {"ray": 6000})
    with pytest.raises(ConfigError, match=r"--host: '0.0.0.0' is not allowed while it is up on '127.0.0.1'"):
        new_state(running, "0.0.0.0", {})


def test_one_port_for_two_services_is_refused() -> None:
    with pytest.raises(ConfigError, match="5000 is not allowed: it is the port of mlflow too"):
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
    home.save(State(mark="ab", host="0.0.0.0"))
    for name in ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["up", "--home", str(home.path)])
    assert done.exit_code == 2
    assert "'0.0.0.0' is not allowed without authentication" in done.output


def test_what_services_find_in_their_environment(home: ServerHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the shell")
    found = home.environment(State(mark="ab", ports=PORTS | {"prefect": 4201}))
    assert "RAY_AUTH_TOKEN" not in found
    assert found["RAY_AUTH_TOKEN_PATH"] == str(home.path / "ray-token")
    assert found["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4201,http://localhost:4201"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_none(host: str) -> None:
    check_host(host, {})


def test_a_taken_port_is_refused_before_anything_starts(home: ServerHome) -> None:
    state = State(mark="cd")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--mlflow-port: {port} is not allowed: Address already in use on 127"):
            check_free("127.0.0.1", "mlflow", port)
        state.ports = dict.fromkeys(PORTS, port)
        with pytest.raises(ConfigError, match="Address already in use"):
            start_missing(home, state, servers(home, state))
    assert state.started == {}
    assert home.load() is None


def test_down_ends_by_mark_and_nothing_else(home: ServerHome) -> None:
    state = State(mark="test-of-down")
    hands = worker(home, state)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        subprocess.Popen(sleep, env=os.environ | {"XRAY_RUN_MARK": hands.mark(state)}) as ours,
        subprocess.Popen(sleep, env=os.environ | {"XRAY_RUN_MARK": "another"}) as theirs,
    ):
        # Its number is remembered, but it has become somebody else's.
        state.started = {"ray": ProcessRecord(pid=theirs.pid, created=psutil.Process(theirs.pid).create_time() - 60)}
        assert stop(home, state, [hands, *servers(home, state)]) == ["worker"]
        assert ours.wait(10) != 0
        assert theirs.poll() is None
        theirs.kill()
    assert home.load() == State(mark="test-of-down")


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
    with home.held(), pytest.raises(ConfigError, match="another xray up or down is at work"), home.held():
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


def service(code: str, healthy: bool) -> Service:
    return Service(
        "ray", "Thing", [sys.executable, "-c", code], "http://here", lambda _: healthy, {"GREETING": "hello"}
    )


def test_a_service_that_ends_says_why(home: ServerHome) -> None:
    """…with the end of its log; it had its variables, and was remembered before it could end."""
    state = State(mark="ef" * 16)
    thing = service("import os, sys; sys.exit(os.environ['GREETING'] + ': no such disk')", healthy=False)
    assert start_missing(home, state, [thing]) == ["ray"]
    assert home.load() == state
    with pytest.raises(
        NotUpError, match=r"Thing ended as soon as it was started. The end of .*ray.log:\n  hello: no such"
    ):
        wait_healthy(home, state, [thing], print)
    stop(home, state, [thing])


def test_what_is_up_is_left_alone(home: ServerHome) -> None:
    state, said = State(mark="fe" * 16), list[str]()
    thing = service("import time; time.sleep(60)", healthy=True)
    assert start_missing(home, state, [thing]) == ["ray"]
    wait_healthy(home, state, [thing], said.append)
    assert said == ["Thing    http://here"]
    before = state.started["ray"]
    assert start_missing(home, state, [thing]) == []
    os.kill(before.pid, signal.SIGKILL)
    os.waitpid(before.pid, 0)
    assert start_missing(home, state, [thing]) == ["ray"]
    assert state.started["ray"] != before
    assert stop(home, state, [thing]) == ["ray"]
    assert state.started == {}
    assert not home.ray_sessions(state).exists()
