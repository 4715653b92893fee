"""Agents in processes: what they return, and what their faults cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.agents import sample_agents
from tests.unit.agents.answering import Answering, serving
from tests.unit.agents.parts import World
from xray_runtime.agents.outcomes import Outcome
from xray_runtime.agents.posted import Posted
from xray_runtime.agents.runner import Address, Runner, open_runner
from xray_runtime.kernel.confine.confine import confinement
from xray_runtime.methods.common.environment import AgentConfig
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPO

HERE = sample_agents.__name__
LIMITS: dict[str, Any] = {"timeout_s": 20.0, "memory_mb": 1024, "output_mb": 1.0, "max_processes": 6}


def config(**fields: Any) -> AgentConfig:
    return AgentConfig(**LIMITS | fields)


def address(world: World, name: str = "a") -> Address:
    episode = world.open(name)
    return Address(world.gateway.url(episode), episode.secret)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = open_runner(config(agent=f"{HERE}:faulty"), tmp_path_factory.mktemp("log") / "agents.log")
    yield runner
    runner.close()


def outcome(runner: Runner, world: World, **task: Any) -> Outcome:
    return runner.start({"prompt": "question", **task}, address(world)).outcome.result(100)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("none", Outcome(Posted(1.0))),
        ("nothing", Outcome()),
        ("raises", Outcome(broken="it raised OSError: the page is gone")),
        ("exits", Outcome(broken="its process ended with 3")),
        ("leaks", Outcome(broken="it raised MemoryError")),
        ("nan", Outcome(broken="the agent returned no valid result: the reward is nan: must be a finite number")),
        ("unusable", Outcome(Posted(unusable="the site was down"))),
    ],
)
def test_a_fault_costs_its_own_episode(faulty: Runner, world: World, fault: str, expected: Outcome) -> None:
    assert outcome(faulty, world, fault=fault) == expected
    # The next one runs in the same process.
    assert outcome(faulty, world, fault="none") == Outcome(Posted(1.0))


def test_an_agent_that_hangs_is_ended_and_another_that_died_with_its_parent_is_infrastructure(
    world: World, tmp_path: Path
) -> None:
    runner = open_runner(config(agent=f"{HERE}:faulty", timeout_s=5.0), tmp_path / "agents.log")
    try:
        assert outcome(runner, world, fault="hangs") == Outcome(broken="it took longer than timeout_s = 5")
        assert outcome(runner, world, fault="kills") == Outcome(infrastructure="the agents' process died")
        assert outcome(runner, world, fault="none") == Outcome(Posted(1.0))
        run = runner.start({"prompt": "a", "fault": "hangs"}, address(world))
        run.stop()
        assert run.outcome.result(50).broken == "it was stopped"
    finally:
        runner.close()


def test_descendants_end_with_their_agent(faulty: Runner, world: World) -> None:
    seconds = "98765.4321"
    assert outcome(faulty, world, fault="daemon", seconds=seconds) == Outcome(Posted(1.0))
    assert not [p for p in psutil.process_iter(["cmdline"]) if seconds in (p.info["cmdline"] or ())]


def test_an_agent_that_posted_its_result_can_add_nothing(faulty: Runner, world: World) -> None:
    episode = world.open()
    run = faulty.start({"prompt": "question", "fault": "after"}, Address(world.gateway.url(episode), episode.secret))
    run.outcome.result(100)
    assert (episode.reward, episode.is_over, len(episode.calls())) == (0.25, True, 1)


def test_an_async_agent_and_one_that_cannot_start(world: World, tmp_path: Path) -> None:
    runner = open_runner(config(agent=f"{HERE}:is_async"), tmp_path / "agents.log")
    assert outcome(runner, world) == Outcome(Posted(0.5, info={"steps": 1.0}))
    runner.close()
    with pytest.raises(RuntimeError, match=r"the agent .*:missing cannot start: AttributeError"):
        open_runner(config(agent=f"{HERE}:missing"), tmp_path / "agents.log")


COMMAND = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"model": "x", "messages": [{"role": "user", "content": task["prompt"]}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
assert os.listdir(".") == []
open("left", "w").close()
print("not the result")
print(json.dumps({"value": len(answer["choices"][0]["message"]["content"]), "info": {"n": task["n"]}}))
"""


def test_a_command_runs_in_an_empty_directory_and_prints_its_result(world: World, tmp_path: Path) -> None:
    runner = open_runner(config(command=[sys.executable, "-c", COMMAND]), tmp_path / "agents.log")
    episode = world.open()
    run = runner.start({"prompt": "question", "n": 3}, Address(world.gateway.url(episode), episode.secret))
    text = world.tokenizer.decode(run.outcome.result(100) and episode.calls()[0].ids, skip_special_tokens=True)
    assert run.outcome.result() == Outcome(Posted(float(len(text)), info={"n": 3.0}))
    runner.close()


def test_a_command_finds_its_virtual_environment_and_its_directory(world: World, tmp_path: Path) -> None:
    program = tmp_path / "venv" / "bin" / "play"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "[$VIRTUAL_ENV]" >&2\ntest -e files || exit 4\nrm files\necho 0.5\n')
    program.chmod(0o755)
    fields = {"command": ["play"], "venv": str(tmp_path / "venv")}
    log = tmp_path / "agents.log"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "files").write_text("")
    runner = open_runner(config(**fields, directory=str(tmp_path / "mine")), log)
    # Each episode has a copy of its own.
    assert [outcome(runner, world) for _ in range(2)] == [Outcome(Posted(0.5))] * 2
    runner.close()
    assert f"[{tmp_path / 'venv'}]" in log.read_text()
    runner = open_runner(config(**fields), log)
    assert outcome(runner, world) == Outcome(broken="its command ended with 4")
    runner.close()


FUNCTION = """
import asyncio, json, os, pathlib, urllib.request

from beside import question

async def play(task):
    print(json.dumps(100.0))  # not the result
    body = json.dumps({"model": "x", "messages": [{"role": "user", "content": question(task)}]}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(url, body, headers))
    if task["reads"] is not None:
        return len(pathlib.Path(task["reads"]).read_text())
    return {"value": 0.5, "info": {"files": len([*pathlib.Path().glob("*.py")])}}
"""


def test_a_function_with_a_directory_runs_in_a_sandbox(world: World, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "agent.py").write_text(FUNCTION)
    (tmp_path / "mine" / "beside.py").write_text("def question(task):\n    return task['prompt']\n")
    (tmp_path / "secret").write_text("not for agents")
    given = config(agent="agent:play", directory=str(tmp_path / "mine"))
    runner = open_runner(given, tmp_path / "agents.log")
    episode = world.open()
    run = runner.start({"prompt": "question", "reads": None}, Address(world.gateway.url(episode), episode.secret))
    assert run.outcome.result(100) == Outcome(Posted(0.5, info={"files": 2.0}))
    assert len(episode.calls()) == 1
    assert outcome(runner, world, reads="beside.py") == Outcome(Posted(46.0))
    if confinement() != "limits":
        assert outcome(runner, world, reads=str(tmp_path / "secret")) == Outcome(broken="its command ended with 1")
        assert "Error: " in (tmp_path / "agents.log").read_text()
    runner.close()
    assert PPO.functions_of(PPOConfig(environment=given, max_new_tokens=4)) == []
    assert PPO.functions_of(PPOConfig(environment=config(agent="agent:play"), max_new_tokens=4)) == ["agent:play"]


def test_a_sandbox_that_does_not_start_is_infrastructure(world: World, tmp_path: Path) -> None:
    runner = open_runner(config(command=["true"], sandbox="http://127.0.0.1:9/boxes"), tmp_path / "agents.log")
    failed = outcome(runner, world).infrastructure
    assert str(failed).startswith("no sandbox starts: OSError: http://127.0.0.1:9/boxes: ConnectError")
    runner.close()


def test_a_service_is_asked_with_an_address(world: World, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    answers = iter([(200, b'{"value": 2}'), (500, b""), (404, b""), (200, b"no")])

    class Handler(Answering):
        def do_POST(self) -> None:
            asked.append(self.body())
            status, content = next(answers)
            self.answer(content, status)

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        url = f"http://127.0.0.1:{server.server_port}/play"
        runner = open_runner(config(url=url), tmp_path / "agents.log")
        assert outcome(runner, world) == Outcome(Posted(2.0))
        assert asked[0]["task"] == {"prompt": "question"}
        assert asked[0]["base_url"].endswith("/episodes/a/v1")
        assert outcome(runner, world) == Outcome(infrastructure=f"{url}: status 500")
        assert outcome(runner, world) == Outcome(broken="status 404")
        assert outcome(runner, world) == Outcome(broken="the answer is not JSON: no")
    down = outcome(runner, world)
    assert down.infrastructure is not None
    assert "ConnectError" in down.infrastructure
    runner.close()
