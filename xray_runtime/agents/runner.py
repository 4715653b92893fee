"""Runs an agent once: a function, a command, or a service. Each gets a task and the address of its episode."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from xray_runtime.agents.local_sandbox import LocalSandbox
from xray_runtime.agents.outcomes import Outcome, outcome_of, outcome_of_command, outcome_of_function, then
from xray_runtime.agents.sandboxes import call
from xray_runtime.agents.sandboxes.base import Box, Limits, Program, Sandbox
from xray_runtime.agents.sandboxes.remote import RemoteSandbox
from xray_runtime.agents.supervisor import AgentWorker
from xray_runtime.kernel.bounded_http import PLAIN, AnswerError, parsed, read
from xray_runtime.methods.common.environment import AgentConfig
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
    """The runner of a config.

    Raises:
        RuntimeError: the agent cannot start.
        ValueError: it is not allowed, or no sandbox keeps it in.
    """
    # Here too: the config may come from a stranger's checkpoint.
    config.check_allowed()
    if config.url is not None:
        return _ServiceRunner(config.url, config.timeout_s)
    limits = Limits(
        config.timeout_s, config.memory_mb, int(config.output_mb * 2**20), config.max_processes, config.disk_mb
    )
    if not config.is_sandboxed:
        return _FunctionRunner(config.agent, limits, log_path)
    if config.sandbox is not None:
        return _CommandRunner(config, limits, RemoteSandbox(config.sandbox))
    return _CommandRunner(config, limits, LocalSandbox(log_path, accepts_weak=config.accept_weak_sandbox))


class _FunctionRunner:
    """A function, in a forked child of a worker process."""

    def __init__(self, agent: str | None, limits: Limits, log_path: Path) -> None:
        self._worker, self._limits = AgentWorker(agent, log_path), asdict(limits)

    def start(self, task: Mapping[str, Any], address: Address) -> Run:
        request = {"task": dict(task), "variables": address.variables(), "limits": self._limits}
        number, answer = self._worker.run(request)
        return Run(then(answer, outcome_of_function), lambda: self._worker.kill(number))

    def close(self) -> None:
        self._worker.close()


class _CommandRunner:
    """A command in a sandbox, which gets the task as JSON on its standard input, or a function there."""

    def __init__(self, config: AgentConfig, limits: Limits, sandbox: Sandbox) -> None:
        self._limits, self._sandbox = limits, sandbox
        self._command = config.command or _calling(config)
        self._files, self._venv = (None if path is None else Path(path) for path in (config.directory, config.venv))

    def start(self, task: Mapping[str, Any], address: Address) -> Run:
        gateway, _, path = address.url.partition("/episodes/")
        here = Address(f"{self._sandbox.address(gateway)}/episodes/{path}", address.secret)
        try:
            name = self._sandbox.start(Box(self._limits, self._files, self._venv, gateway))
        except OSError as error:
            failed = Future[Outcome]()
            failed.set_result(Outcome(infrastructure=f"no sandbox starts: {described(error)}"))
            return Run(failed, lambda: None)
        ended = self._sandbox.run(name, Program(self._command, json.dumps(dict(task)), here.variables()))

        def stop() -> None:
            self._sandbox.stop(name)

        ended.add_done_callback(lambda _: stop())
        return Run(then(ended, outcome_of_command), stop)

    def close(self) -> None:
        self._sandbox.close()


def _calling(config: AgentConfig) -> list[str]:
    """The command that calls the function of a config."""
    is_ours = config.venv is None and config.sandbox is None
    python = sys.executable if is_ours else "python"
    return [python, "-c", Path(call.__file__).read_text(), str(config.agent)]


class _ServiceRunner:
    """A service: `POST URL {"task": {...}, "base_url": ..., "api_key": ...}` → the result, or null if it was posted."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._client = httpx.Client(headers=PLAIN, timeout=timeout_s)

    def start(self, task: Mapping[str, Any], address: Address) -> Run:
        outcome = Future[Outcome]()
        body = {"task": dict(task), "base_url": f"{address.url}/v1", "api_key": address.secret}
        threading.Thread(target=lambda: outcome.set_result(self._ask(body)), daemon=True).start()
        # A service is not ours to end; the gateway refuses its further calls.
        return Run(outcome, lambda: None)

    def _ask(self, body: dict[str, Any]) -> Outcome:
        try:
            with self._client.stream("POST", self._url, json=body) as answer:
                if answer.status_code >= 500:
                    return Outcome(infrastructure=f"{self._url}: status {answer.status_code}")
                if answer.status_code >= 400:
                    return Outcome(broken=f"status {answer.status_code}")
                return outcome_of(parsed(read(answer, self._timeout_s)))
        except httpx.ReadTimeout:
            return Outcome(broken=f"no answer within timeout_s = {self._timeout_s:g}")
        except AnswerError as error:
            return Outcome(broken=str(error))
        except (httpx.HTTPError, RuntimeError) as error:
            return Outcome(infrastructure=f"{self._url}: {described(error)}")

    def close(self) -> None:
        self._client.close()
