"""The interface of environments for multi-turn rollouts.

A dataset row begins an episode; each reply of the policy is a step, until the environment ends the episode. Messages
are in chat form: {"role": "user", "content": text}; a tool's message may have `name` and `tool_call_id`.

A game of several has `environment.seats`. The policy plays each of them; each reads only the messages of its own turns,
and has a row of its own to learn from. `seat` names who replies next, and reads the messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Start:
    """The start of an episode."""

    messages: list[dict[str, Any]] | None = None
    """Messages as in datasets: an assistant's may have `tool_calls`, the first `tools`. None: the dataset's prompt."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of functions for the chat template; None: those of the first message."""
    seat: str = ""
    """The seat that replies first; "": the first of `environment.seats`."""

    def prompt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The policy's first prompt; `messages` are the dataset's."""
        begun = self.messages or messages
        return begun if self.tools is None else [begun[0] | {"tools": self.tools}, *begun[1:]]


@dataclass(frozen=True)
class Step:
    """The environment's answer to a reply."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Observations, which the policy reads next."""
    reward: float = 0.0
    terminated: bool = False
    """Whether the task is over."""
    truncated: bool = False
    """Whether the episode ends for another reason, such as a limit of steps."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON for metrics and logs."""
    seat: str = ""
    """The seat that replies next, "" the same again. The messages before its first turn are its prompt (none: the
    dataset's)."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Seat → its reward, on its last turn; `reward` is for the seat that replied. One without any turn gets none."""


class Environment(Protocol):
    """One object for each episode, made by a class, or a function without arguments, at "module:name".

    Both methods may be `async def`; otherwise they run in threads, not always in the same one. An episode may be
    repeated from its start in another process: the same task, seed and replies must lead to the same state. An optional
    method `close(self)` is called when an episode is closed, but not if its process is killed.
    """

    def reset(self, task: Mapping[str, Any], seed: int) -> Start | None | Awaitable[Start | None]:
        """Begin an episode. `task` is {"prompt": text, "messages": [...], column of the dataset: its value, ...}."""

    def step(self, reply: str) -> Step | Awaitable[Step]:
        """Answer the policy's reply."""
