"""The interface of environments for multi-turn rollouts.

A dataset row begins an episode; each reply of the policy is a step, until the environment ends the episode. Messages
are in chat form: {"role": "user", "content": text}; a tool's message may have `name` and `tool_call_id`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from xray_runtime.kernel.errors import shown
from xray_runtime.rewards.source import as_bounded, must_be_bounded

OBSERVED_ROLES = ("system", "tool", "user")
START_ROLES = ("assistant", *OBSERVED_ROLES)
MORE = {"assistant": ("tool_calls",), "tool": ("name", "tool_call_id")}
"""Role → further keys of its messages."""


@dataclass(frozen=True)
class Start:
    """The start of an episode."""

    messages: list[dict[str, Any]] | None = None
    """Messages as in datasets: an assistant's may have `tool_calls`, the first `tools`. None: the dataset's prompt."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of functions for the chat template; None: those of the first message."""

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


def as_start(value: Any) -> Start:
    """Check the return value of `reset`; None becomes a Start without messages. Raises ValueError with the field,
    its value and what is allowed."""
    if value is None:
        return Start()
    if not isinstance(value, Start):
        raise ValueError(f"reset returned {shown(value)}: must be a Start or None")
    if value.messages is not None:
        _check_messages("Start", value.messages, START_ROLES)
        if not value.messages:
            raise ValueError("Start.messages is []: must hold a message, or be None for the prompt of the dataset")
        _check_tools("Start.messages[0].tools", value.messages[0].get("tools"))
    _check_tools("Start.tools", value.tools)
    return value


def as_step(value: Any) -> Step:
    """Check the return value of `step`; its reward becomes a float, and its info is sorted by name. Raises ValueError
    with the field, its value and what is allowed."""
    if not isinstance(value, Step):
        raise ValueError(f"step returned {shown(value)}: must be a Step")
    _check_messages("Step", value.messages, OBSERVED_ROLES)
    reward = as_bounded(value.reward)
    if reward is None:
        raise ValueError(f"Step.reward is {shown(value.reward)}: {must_be_bounded(value.reward)}")
    for name, flag in (("terminated", value.terminated), ("truncated", value.truncated)):
        if not isinstance(flag, bool):
            raise ValueError(f"Step.{name} is {shown(flag)}: must be True or False")
    if not isinstance(value.info, dict):
        raise ValueError(f"Step.info is {shown(value.info)}: must be a dict")
    _check_json("Step.info", value.info)
    info = dict(sorted((str(name), each) for name, each in value.info.items()))
    return Step(value.messages, reward, value.terminated, value.truncated, info)


def _check_messages(owner: str, messages: Any, roles: tuple[str, ...]) -> None:
    if not isinstance(messages, list):
        raise ValueError(f"{owner}.messages is {shown(messages)}: must be a list of messages")
    for i, message in enumerate(messages):
        where = f"{owner}.messages[{i}]"
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise ValueError(f"{where} is {shown(message)}: must be a dict of role and content")
        role = message["role"]
        if role not in roles:
            raise ValueError(f"{where}.role is {shown(role)}: must be one of {', '.join(roles)}")
        allowed = ["role", "content", *MORE.get(role, ()), *(["tools"] if owner == "Start" and i == 0 else [])]
        for name in message:
            if name not in allowed:
                raise ValueError(f"{where} has {shown(name)}: its role may have {', '.join(allowed)}")
        for name in ("content", "name", "tool_call_id"):
            if not isinstance(message.get(name, ""), str):
                raise ValueError(f"{where}.{name} is {shown(message[name])}: must be a string")
            _check_text(f"{where}.{name}", message.get(name, ""))
        if "tool_calls" in message:
            _check_calls(f"{where}.tool_calls", message["tool_calls"])


def _check_calls(where: str, calls: Any) -> None:
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        called = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
        if not isinstance(calls, list) or not isinstance(called[0], str) or not isinstance(called[1], dict):
            raise ValueError(
                f'{where} is {shown(calls)}: must be a list of {{"function": {{"name": text, "arguments": dict}}}}'
            )
    _check_json(where, calls)


def _check_tools(where: str, tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where} is {shown(tools)}: must be a list of JSON schemas (dict), or None")
    _check_json(where, tools)


def _check_json(name: str, value: Any) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is {shown(value)}: must be JSON ({error})") from error
    _check_text(name, text)


def _check_text(name: str, text: str) -> None:
    """Python strings may hold half a character, as "\\ud800", which tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is {shown(text)}: must be text that UTF-8 can write ({error.reason})") from error
