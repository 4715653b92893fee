"""Environments from Python functions as tools, and from environments with Gymnasium's API.

    def shop():
        return from_tools([search, buy], judge)()

    policy = xray.ppo(sft, prompts=data, environment={"path": shop})

Calls have the form of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import jsonschema

from xray_runtime.methods.common.environment_protocol import Environment, Start, Step
from xray_runtime.rewards.source import described

TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""Also matches an incomplete call, which is answered with an error."""
NO_ACTION = "Your reply holds no valid action. Try again."
WITHOUT_TORCH = threading.Lock()
"""Held while torch is hidden, since environments are made in threads."""

Judge = Callable[[Mapping[str, Any], str], float | Awaitable[float]]
"""(task, reply) → reward."""


def from_tools(functions: Sequence[Callable[..., Any]], judge: Judge) -> Callable[[], Environment]:
    """A factory of environments in which the policy calls `functions`, any number of times and several in one reply.

    Each call is answered with a message of the tool: the function's result (strings as they are, others as JSON), or
    "Error: " and the reason, which `info["tool_errors"]` counts. A reply without a call ends the episode.

    Args:
        functions: with type hints, and docstrings that describe each argument in "Args:". They may be async; then
            `step` is async too, and the others are called in threads.
        judge: returns the reward of the last reply; it may be async.

    Raises:
        ValueError: a function's signature and docstring do not give a schema.
    """
    return partial(
        _ToolEnvironment, {function.__name__: (function, tool_schema(function)) for function in functions}, judge
    )


class _ToolEnvironment:
    def __init__(self, tools: dict[str, tuple[Callable[..., Any], dict[str, Any]]], judge: Judge) -> None:
        self._tools, self._judge = tools, judge
        self._is_async = any(map(inspect.iscoroutinefunction, (judge, *(function for function, _ in tools.values()))))
        self._task: Mapping[str, Any] = {}

    def reset(self, task: Mapping[str, Any], seed: int) -> Start:
        self._task = task
        return Start(tools=[schema for _, schema in self._tools.values()])

    def step(self, reply: str) -> Step | Awaitable[Step]:
        answering = self._step(reply)
        if self._is_async:
            return answering
        # Without async functions it never suspends.
        try:
            answering.send(None)
        except StopIteration as end:
            answer: Step = end.value
            return answer
        raise AssertionError("a tool that is not async was suspended")

    async def _step(self, reply: str) -> Step:
        calls = TOOL_CALL.findall(reply)
        if not calls:
            return Step(reward=await self._run(self._judge, self._task, reply), terminated=True)
        messages, num_errors = [], 0
        for call in calls:
            message = {"role": "tool"}
            try:
                name, arguments = self._read(call)
                message["name"] = name
                message["content"] = await self._call(name, arguments)
            except Exception as error:  # of the call, or of the function
                num_errors += 1
                message["content"] = f"Error: {error if isinstance(error, _CallError) else described(error)}"
            # JSON in a call can hold a lone surrogate, which tokenizers refuse.
            message["content"] = message["content"].encode(errors="backslashreplace").decode()
            messages.append(message)
        return Step(messages, info={"tool_errors": num_errors})

    def _read(self, text: str) -> tuple[str, Any]:
        """(tool name, arguments) of a call."""
        try:
            call = json.loads(text)
        except ValueError as error:
            raise _CallError(f"the call is not JSON ({error})") from error
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise _CallError('a call must be {"name": ..., "arguments": {...}}')
        if call["name"] not in self._tools:
            raise _CallError(f"there is no tool {call['name']!r}; there are: {', '.join(self._tools)}")
        return call["name"], call.get("arguments", {})

    async def _call(self, name: str, arguments: Any) -> str:
        function, schema = self._tools[name]
        try:
            jsonschema.validate(arguments, schema["function"]["parameters"])
            inspect.signature(function).bind(**arguments)
        except jsonschema.ValidationError as error:
            raise _CallError(f"wrong arguments of {name!r}: {error.message}") from error
        except TypeError as error:
            raise _CallError(f"wrong arguments of {name!r}: {error}") from error
        result = await self._run(function, **arguments)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    async def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        if self._is_async:
            return await asyncio.to_thread(function, *args, **kwargs)
        return function(*args, **kwargs)


class _CallError(ValueError):
    """An error in a call."""


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function, for a dataset's column `tools`. Raises ValueError as `from_tools`."""
    from transformers.utils import chat_template_utils

    name = getattr(function, "__name__", repr(function))
    try:
        # The library would import torch for type checks: gigabytes of address space in each worker.
        with WITHOUT_TORCH, mock.patch.object(chat_template_utils, "is_torch_available", return_value=False):
            schema: dict[str, Any] = chat_template_utils.get_json_schema(function)
    except Exception as error:
        raise ValueError(f"the tool {name!r} has no schema ({described(error)})") from error
    # Some chat templates do not know this key.
    schema["function"].pop("return", None)
    return schema


def from_gymnasium(
    make: Callable[[], Any], parse: Callable[[str], Any | None], render: Callable[[Any], str] = str
) -> Callable[[], Environment]:
    """A factory of environments from objects with Gymnasium's API.

    The first observation is appended to the dataset's prompt. A reply without an action gets an error message and
    reward 0; the environment does not see it.

    Args:
        make: returns an object with `reset(seed=)` and `step(action)`.
        parse: reply → action; None if it holds none.
        render: observation → text.
    """
    return partial(_GymnasiumEnvironment, make, parse, render)


class _GymnasiumEnvironment:
    def __init__(
        self, make: Callable[[], Any], parse: Callable[[str], Any | None], render: Callable[[Any], str]
    ) -> None:
        self._env, self._parse, self._render = make(), parse, render

    def reset(self, task: Mapping[str, Any], seed: int) -> Start:
        observation, _ = self._env.reset(seed=seed)
        text, before = self._render(observation), list(task["messages"])
        message = {"role": "user", "content": text}
        # Many chat templates refuse two user messages in a row.
        if before and before[-1]["role"] == "user":
            last = before.pop()
            # The first message may hold `tools`.
            message = last | {"content": f"{last['content']}\n\n{text}"}
        return Start([*before, message])

    def step(self, reply: str) -> Step:
        action = self._parse(reply)
        if action is None:
            return Step([{"role": "user", "content": NO_ACTION}])
        observation, reward, terminated, truncated, info = self._env.step(action)
        message = {"role": "user", "content": self._render(observation)}
        # It may also hold arrays and objects.
        plain = {name: value for name, value in info.items() if isinstance(value, bool | int | float | str)}
        return Step([message], float(reward), bool(terminated), bool(truncated), plain)

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()
