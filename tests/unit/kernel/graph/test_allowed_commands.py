"""A config runs and reads for agents only what the environment names."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import xray
from tests.unit.kernel.graph.calls import parts, refused
from xray_runtime.agents.runner import open_runner
from xray_runtime.kernel.graph.graph import Graph
from xray_runtime.methods.common.allowed_commands import COMMANDS, PATHS, check_command, check_path
from xray_runtime.methods.common.environment import AgentConfig

RUN = [
    (["python", "agent.py"], "python agent.py", True),
    (["python", "agent.py"], "node a.js, python agent.py", True),
    (["python", "agent.py", "--n", "3"], "python agent.py *", True),
    (["python", "agent.py"], "python agent.??", True),
    (["python", "other.py"], "python agent.py", False),
    (["python", "agent.py", "; rm"], "python agent.py", False),
    (["python", "-c", "import os; os.system('id')"], "python agent.py", False),
    (["python agent.py"], "python agent.py", False),
    (["/tmp/python", "agent.py"], "python agent.py", False),
    (["python", "*"], "python agent.py", False),
    (["python", "agent.py"], "", False),
    (["python", "agent.py"], " , ,", False),
    (["python", "agent.py"], "PYTHON AGENT.PY", False),
    (["sh", "-c", "a,b"], "sh -c a?b", True),
    (["python", "agent.py\nid"], "python agent.py", False),
]


@pytest.mark.parametrize(("command", "allowed", "is_allowed"), RUN)
def test_commands(command: list[str], allowed: str, is_allowed: bool) -> None:
    if is_allowed:
        check_command(command, "command", {COMMANDS: allowed})
        return
    with pytest.raises(ValueError, match=rf"^command = .* is not allowed: {COMMANDS} in the environment"):
        check_command(command, "command", {COMMANDS: allowed})


READ = [
    ("work/agent", "{0}/work/agent", True),
    ("work/agent", "/elsewhere:{0}/work/agent", True),
    ("work/agent", "{0}/work/*", True),
    ("work", "{0}/work/*", True),
    ("work/agent", "{0}/work", False),
    ("work/../keys", "{0}/work/*", False),
    ("work/to-keys", "{0}/work/*", False),
    ("work2", "{0}/work/*", False),
    ("keys", "{0}/work", False),
    ("keys", "", False),
    ("keys", "/*", True),
    ("to-work/agent", "{0}/work/*", True),
    ("work", "{0}/to-work", True),
]


@pytest.mark.parametrize(("path", "allowed", "is_allowed"), READ)
def test_directories(path: str, allowed: str, is_allowed: bool, tmp_path: Path) -> None:
    for name in ("work/agent", "work2", "keys"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "work" / "to-keys").symlink_to(tmp_path / "keys")
    (tmp_path / "to-work").symlink_to("work")
    given, variables = str(tmp_path / path), {PATHS: allowed.format(tmp_path)}
    if is_allowed:
        check_path(given, "venv", variables)
        return
    with pytest.raises(ValueError, match=rf"^venv = .* is not allowed: {PATHS} in the environment"):
        check_path(given, "venv", variables)


def test_the_line_says_what_to_set() -> None:
    command = ["python", "-c", "print(1, 2)"]
    with pytest.raises(ValueError, match="to allow it") as error:
        check_command(command, "command", {COMMANDS: "node a.js"})
    setting = str(error.value).partition(f"to allow it: {COMMANDS}=")[2]
    check_command(command, "command", {COMMANDS: shlex.split(setting)[0]})


REFUSED = [
    ({"command": ["sh", "-c", "id"]}, "ppo: environment.command = "),
    ({"command": ["sh", "-c", "id"], "sandbox": "http://stranger"}, "ppo: environment.command = "),
    ({"agent": "mine.agents:play", "directory": "/etc"}, "ppo: environment.directory = '/etc' is not allowed"),
    ({"agent": "mine.agents:play", "directory": "/etc", "sandbox": "http://stranger"}, "ppo: environment.directory"),
    ({"agent": "mine.agents:play", "venv": "/usr"}, "ppo: environment.venv = '/usr' is not allowed"),
    ({"agent": "os:system", "sandbox": "http://stranger"}, "ppo: 'os:system' is not allowed: it would import os"),
    ({"agent": "os:system"}, "ppo: 'os:system' is not allowed: it would import os"),
    ({"path": "os:system"}, "ppo: 'os:system' is not allowed: it would import os"),
]


@pytest.mark.parametrize(("environment", "why"), REFUSED)
def test_a_graph_refuses_before_anything_runs(
    environment: dict[str, Any], why: str, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (COMMANDS, PATHS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", "mine.agents")
    data, base, _ = parts()
    said = refused(lambda: xray.ppo(base, data, rewards=[], environment=environment))
    assert said.startswith(why)
    if "command" in environment or "directory" in environment:
        with pytest.raises(ValueError, match="is not allowed"):
            open_runner(AgentConfig(**environment), Path("log"))
