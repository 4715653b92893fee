"""Episodes of an environment in worker processes, so that a fault only costs its own episode."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from xray_runtime.agents.environments.supervisor import Supervisor
from xray_runtime.methods.common.environment_protocol import Start, Step


class EnvironmentPool:
    """Worker processes for an environment. Any thread may call its methods.

    Args:
        environment: "module:name" of a class or a function without arguments.
        num_workers: number of processes; an episode runs in the one of its number modulo this.
        timeout_s: limit of one reset or step, from the call of user code on; an episode that takes longer fails, and
            its process is killed.
        memory_mb: address space of each process.
        log_path: file for their output; None: discard it.

    Raises:
        RuntimeError: a worker does not start; names the cause.
    """

    def __init__(
        self, environment: str, num_workers: int, timeout_s: float, memory_mb: int, log_path: Path | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._supervisors = [Supervisor(environment, timeout_s, memory_mb, log_path) for _ in range(num_workers)]
        # Not a bound method, which would keep the pool alive.
        self._end = weakref.finalize(self, _stop, self._supervisors, 0.0)
        try:
            for supervisor in self._supervisors:
                supervisor.ready.result()
        except BaseException:
            self._end()
            raise

    def reset(self, episode: int, task: Mapping[str, Any], seed: int) -> Future[Start]:
        """Begin an episode; an open one with this number is closed.

        The future fails with EnvironmentFailure if the episode is at fault, and with RuntimeError if its process does
        not start again or the pool was shut down. Raises ValueError if `task` is not JSON.
        """
        request = {"op": "reset", "task": dict(task), "seed": seed}
        try:
            json.dumps(request)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the task of episode {episode} must be JSON ({error})") from error
        return self._of(episode).ask(episode, request)

    def step(self, episode: int, reply: str) -> Future[Step]:
        """Send the policy's reply to an episode, after its last answer. If the future fails, as in `reset`, the episode
        is over."""
        return self._of(episode).ask(episode, {"op": "step", "reply": reply})

    def close(self, episode: int) -> None:
        """Close an episode, if there is one with this number, without waiting."""
        self._of(episode).close(episode)

    def shutdown(self) -> None:
        """End every process, after at most `timeout_s` for closing episodes."""
        if self._end.detach() is not None:
            _stop(self._supervisors, self._timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _of(self, episode: int) -> Supervisor:
        return self._supervisors[episode % len(self._supervisors)]


def _stop(supervisors: Sequence[Supervisor], wait_s: float) -> None:
    for supervisor in supervisors:
        supervisor.stop(wait_s)
    for supervisor in supervisors:
        supervisor.join()
