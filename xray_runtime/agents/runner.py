"""Runs an agent once: a function, a command, or a service. Each gets a task and the address of its episode."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from xray_runtime.agents.outcomes import Outcome, outcome_of
from xray_runtime.agents.supervisor import AgentWorker
from xray_runtime.config.environment import AgentConfig
from xray_runtime.rewards.source import described


@dataclass(frozen=True)
class Address:
    """Where an agent reaches the policy."""

    url: str
    """Base URL of its episode, without `/v1`."""
    secret: str

    def variables(self) -> dict[str, str]:
        """Environment variables, which the SDKs of OpenAI and Anthropic read."""
        host = self.url.partition("://")[2].rpartition(":")[0]
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.secret,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.secret,
            "XRAY_EPISODE_URL": self.url,
            # Calls must not pass through a proxy of the machine.
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), host])),
        }


@dataclass(frozen=True)
class Run:
    """An agent that runs."""

    outcome: Future[Outcome]
    stop: Callable[[], None]
    """Ends it, because its episode is over."""


class Runner(Protocol):
    """Starts agents."""

    def start(self, task: Mapping[str, Any], address: Address) -> Run: ...

    def close(self) -> None: ...


def open_runner(config: AgentConfig, log_path: Path) -> Runner:
    """The runner of a config. Raises RuntimeError if the agent cannot start."""
    if config.url is not None:
        return _ServiceRunner(config.url, config.timeout_s)
    return _ProcessRunner(config, log_path)


class _ProcessRunner:
    """Functions and commands."""

    def __init__(self, config: AgentConfig, log_path: Path) -> None:
        self._config = config
        self._worker = AgentWorker(config.agent, log_path)
        self._limits = {
            "timeout_s": config.timeout_s,
            "memory_mb": config.memory_mb,
            "output_bytes": int(config.output_mb * 2**20),
            "processes": config.max_processes,
        }

    def start(self, task: Mapping[str, Any], address: Address) -> Run:
        config, directory = self._config, None
        variables = address.variables()
        if config.command is not None:
            directory = tempfile.mkdtemp(prefix="xray-agent-")
            if config.directory is not None:
                shutil.copytree(config.directory, directory, symlinks=True, dirs_exist_ok=True)
            variables |= {} if config.venv is None else _of_venv(Path(config.venv))
        request = {"task": dict(task), "variables": variables, "command": config.command, "directory": directory}
        number, outcome = self._worker.run(request | {"limits": self._limits})
        if directory is not None:
            outcome.add_done_callback(lambda _: shutil.rmtree(directory, ignore_errors=True))
        return Run(outcome, lambda: self._worker.kill(number))

    def close(self) -> None:
        self._worker.close()


def _of_venv(path: Path) -> dict[str, str]:
    search = os.pathsep.join([str(path / "bin"), os.environ.get("PATH", os.defpath)])
    return {"VIRTUAL_ENV": str(path), "PATH": search, "PYTHONPATH": "", "PYTHONHOME": ""}


class _ServiceRunner:
    """A service: `POST URL {"task": {...}, "base_url": ..., "api_key": ...}` → the result, or null if it was posted."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._client = url, httpx.Client(timeout=timeout_s)

    def start(self, task: Mapping[str, Any], address: Address) -> Run:
        outcome = Future[Outcome]()
        body = {"task": dict(task), "base_url": f"{address.url}/v1", "api_key": address.secret}
        threading.Thread(target=lambda: outcome.set_result(self._ask(body)), daemon=True).start()
        # A service is not ours to end; the gateway refuses its further calls.
        return Run(outcome, lambda: None)

    def _ask(self, body: dict[str, Any]) -> Outcome:
        try:
            answer = self._client.post(self._url, json=body)
        except httpx.ReadTimeout:
            return Outcome(broken=f"no answer within timeout_s = {self._client.timeout.read:g}")
        except (httpx.HTTPError, RuntimeError) as error:
            return Outcome(infrastructure=f"{self._url}: {described(error)}")
        if answer.status_code >= 500:
            return Outcome(infrastructure=f"{self._url}: status {answer.status_code}")
        if answer.status_code >= 400:
            return Outcome(broken=f"status {answer.status_code}")
        try:
            return outcome_of(answer.json())
        except ValueError:
            return Outcome(broken="the answer is not JSON")

    def close(self) -> None:
        self._client.close()
