"""How a run of an agent ended. Failures are of three sorts:

- infrastructure: there is no result, and the agent is not to blame. It runs again, is counted, and never becomes a
  reward of 0;
- unusable, by the agent's own word, or broken off, because it raised an error, hung, or broke a limit: the episode has
  no reward, so nothing learns from it;
- the task failed: a low reward like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from xray_runtime.agents.posted import Posted, read_posted
from xray_runtime.agents.sandboxes.base import Ended

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Outcome:
    """The end of one run of an agent."""

    posted: Posted | None = None
    """Its result; None: it returned none, or failed."""
    broken: str | None = None
    """How the agent broke its episode."""
    infrastructure: str | None = None
    """Why there is no result, without a fault of the agent."""


def outcome_of(result: Any) -> Outcome:
    """The outcome of a returned value; None is no result."""
    if result is None:
        return Outcome()
    try:
        return Outcome(read_posted(result))
    except ValueError as error:
        return Outcome(broken=f"the agent returned no valid result: {error}")


def outcome_of_function(answer: Mapping[str, Any]) -> Outcome:
    """The outcome of a worker's answer."""
    failed = {name: answer[name] for name in ("broken", "infrastructure") if name in answer}
    return Outcome(**failed) if failed else outcome_of(answer.get("result"))


def outcome_of_command(ended: Ended) -> Outcome:
    """The outcome of a command, which may print its result as the last line."""
    if ended.broken is not None or ended.infrastructure is not None:
        return Outcome(broken=ended.broken, infrastructure=ended.infrastructure)
    if ended.code:
        return Outcome(broken=f"its command ended with {ended.code}")
    last = next((line for line in reversed(ended.output.split("\n")) if line.strip()), "")
    try:
        return outcome_of(json.loads(last))
    except (ValueError, RecursionError):
        return Outcome()


def then(future: Future[T], function: Callable[[T], U]) -> Future[U]:
    """The result of a function of a future's result; neither raises."""
    result = Future[U]()
    future.add_done_callback(lambda done: result.set_result(function(done.result())))
    return result
