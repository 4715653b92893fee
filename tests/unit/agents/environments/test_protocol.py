"""What user code may return, and what it is told otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
    ("value", "line"),
    [
        (None, "step returned None: must be a Step"),
        (Step("hello"), "Step.messages is 'hello': must be a list of messages"),
        (Step([{"role": "user"}]), "Step.messages[0] is {'role': 'user'}: must be a dict of role and content"),
        (
            Step([SAID, {"role": "assistant", "content": ""}]),
            "Step.messages[1].role is 'assistant': must be one of system, tool, user",
        ),
        (Step([{"role": "tool", "content": 3}]), "Step.messages[0].content is 3: must be a string"),
        (
            Step([{"role": "tool", "content": "", "tool_call_id": 1}]),
            "Step.messages[0].tool_call_id is 1: must be a string",
        ),
        (
            Step([{"role": "tool", "content": "\ud800"}]),
            r"Step.messages[0].content is '\ud800': must be text that UTF-8 can write (surrogates not allowed)",
        ),
        (Step([SAID | {"name": "x"}]), "Step.messages[0] has 'name': its role may have role, content"),
        (Step(terminated=1), "Step.terminated is 1: must be True or False"),
        (Step(info=[]), "Step.info is []: must be a dict"),
        (
            Step(info={"a": {1}}),
            "Step.info is {'a': {1}}: must be JSON (Object of type set is not JSON serializable)",
        ),
        (
            Step(info={"a": "\ud800"}),
            r"""Step.info is '{"a": "\ud800"}': must be text that UTF-8 can write (surrogates not allowed)""",
        ),
    ],
)
def test_steps_that_are_refused(value: Any, line: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        as_step(value)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("hello", "reset returned 'hello': must be a Start or None"),
        (Start([]), "Start.messages is []: must hold a message, or be None for the prompt of the dataset"),
        (
            Start([SAID, SAID | {"tools": []}]),
            "Start.messages[1] has 'tools': its role may have role, content",
        ),
        (
            Start([SAID | {"tools": "add"}]),
            "Start.messages[0].tools is 'add': must be a list of JSON schemas (dict), or None",
        ),
        (
            Start([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]),
            "Start.messages[0].tool_calls is [{'function': {'name': 'f', 'arguments': ''}}]: must be a list of "
            '{"function": {"name": text, "arguments": dict}}',
        ),
        (
            Start([{"role": "assistant", "content": "", "tool_calls": None}]),
            'Start.messages[0].tool_calls is None: must be a list of {"function": {"name": text, "arguments": dict}}',
        ),
        (Start(tools=["add"]), "Start.tools is ['add']: must be a list of JSON schemas (dict), or None"),
    ],
)
def test_starts_that_are_refused(value: Any, line: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        as_start(value)
    assert str(caught.value) == line
