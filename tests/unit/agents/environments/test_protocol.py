"""What user code may return, and what it is told otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.message_texts import Messages
from xray_runtime.agents.environments.answer_checks import as_start, as_step
from xray_runtime.methods.common.environment_protocol import Start, Step

SAID = {"role": "user", "content": "x"}


def test_allowed_starts_and_steps() -> None:
    assert as_start(None) == Start()
    start = Start([SAID, {"role": "assistant", "content": "y"}], [{"type": "function"}])
    assert as_start(start) == start
    step = as_step(Step([SAID, {"role": "tool", "content": "1"}], np.float32(0.5), True, False, {"a": [1]}))  # type: ignore[arg-type]
    assert step == Step([SAID, {"role": "tool", "content": "1"}], 0.5, True, False, {"a": [1]})
    assert type(step.reward) is float


def test_a_start_is_what_a_dataset_holds() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        SAID | {"tools": [{"type": "function"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "name": "add", "tool_call_id": "1"},
    ]
    assert as_start(Start(messages)) == Start(messages)
    assert as_step(Step(messages[2:])) == Step(messages[2:])


@pytest.mark.parametrize(
    "value",
    [
        None,
        Step("hello"),
        Step([{"role": "user"}]),
        Step([SAID, {"role": "assistant", "content": ""}]),
        Step([{"role": "tool", "content": 3}]),
        Step([{"role": "tool", "content": "", "tool_call_id": 1}]),
        Step([{"role": "tool", "content": "\ud800"}]),
        Step([SAID | {"name": "x"}]),
        Step(terminated=1),
        Step(info=[]),
        Step(info={"a": {1}}),
        Step(info={"a": "\ud800"}),
    ],
    ids=ascii,
)
def test_steps_that_are_refused(value: Any, message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        as_step(value)


@pytest.mark.parametrize(
    "value",
    [
        "hello",
        Start([]),
        Start([SAID, SAID | {"tools": []}]),
        Start([SAID | {"tools": "add"}]),
        Start([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]),
        Start([{"role": "assistant", "content": "", "tool_calls": None}]),
        Start(tools=["add"]),
    ],
    ids=ascii,
)
def test_starts_that_are_refused(value: Any, message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        as_start(value)
