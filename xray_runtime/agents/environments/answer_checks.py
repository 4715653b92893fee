"""Checks of what an environment returns."""

from __future__ import annotations

import json
from typing import Any

from xray_runtime.kernel.errors import shown
from xray_runtime.methods.common.environment_protocol import Start, Step
from xray_runtime.rewards.source import as_bounded, must_be_bounded

OBSERVED_ROLES = ("system", "tool", "user")
START_ROLES = ("assistant", *OBSERVED_ROLES)
MORE = {"assistant": ("tool_calls",), "tool": ("name", "tool_call_id")}
"""Role → further keys of its messages."""


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
    _check_seat("Start.seat", value.seat)
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
    _check_seat("Step.seat", value.seat)
    if not isinstance(value.rewards, dict):
        raise ValueError(f"Step.rewards is {shown(value.rewards)}: must be a dict of a reward for each seat")
    rewards = {}
    for seat, given in value.rewards.items():
        _check_seat("Step.rewards", seat)
        bounded = as_bounded(given)
        if bounded is None:
            raise ValueError(f"Step.rewards[{seat!r}] is {shown(given)}: {must_be_bounded(given)}")
        rewards[seat] = bounded
    info = dict(sorted((str(name), each) for name, each in value.info.items()))
    return Step(value.messages, reward, value.terminated, value.truncated, info, value.seat, rewards)


def _check_seat(name: str, seat: Any) -> None:
    if not isinstance(seat, str):
        raise ValueError(f"{name} is {shown(seat)}: must be the name of a seat")


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
    """Python strings may hold a lone surrogate, as "\\ud800", which tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is {shown(text)}: must be text that UTF-8 can write ({error.reason})") from error
