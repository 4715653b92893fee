"""Tools and Gymnasium's API as environments."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from xray_runtime.agents.environments.adapters import NO_ACTION, from_gymnasium, from_tools, tool_schema
from xray_runtime.agents.environments.answer_checks import as_start, as_step
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import reply_message
from xray_runtime.data.tokenizing import CHAT_TEMPLATE, CHATML, decode_replies, encode_replies_to, train_tokenizer
from xray_runtime.methods.common.environment_protocol import Start, Step


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def greet(name: str) -> str:
    """Greet somebody.

    Args:
        name: Whom.
    """
    if name == "nobody":
        raise LookupError("nobody is there")
    return f"Hello {name}"


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def judge(task: Any, reply: str) -> float:
    return float(reply == task["answer"])


def played(make: Callable[[], Any], *replies: str) -> tuple[Start, list[Step]]:
    environment = make()
    start = as_start(environment.reset({"prompt": "p", "messages": [], "answer": "5"}, 0))
    return start, [as_step(environment.step(reply)) for reply in replies]


def test_tools() -> None:
    start, steps = played(from_tools([add, greet], judge), call("add", a=2, b=3) + call("greet", name="you"), "5", "6")
    assert start.messages is None
    assert start.tools is not None
    assert [tool["function"]["name"] for tool in start.tools] == ["add", "greet"]
    assert start.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "description": "The second."},
        },
        "required": ["a"],
    }
    assert steps == [
        Step(
            [
                {"role": "tool", "name": "add", "content": "5"},
                {"role": "tool", "name": "greet", "content": "Hello you"},
            ],
            info={"tool_errors": 0},
        ),
        Step(reward=1.0, terminated=True),
        Step(reward=0.0, terminated=True),
    ]


@pytest.mark.parametrize(
    ("reply", "name", "answer"),
    [
        ("<tool_call>{a}</tool_call>", None, "Error: the call is not JSON (Expecting property name"),
        ('<tool_call>{"name": "add", "arg', None, "Error: the call is not JSON ("),
        (call("sub", a=1), None, "Error: there is no tool 'sub'; there are: add, greet"),
        (call("add", b=1), "add", "Error: wrong arguments of 'add': 'a' is a required property"),
        (call("add", a="1"), "add", "Error: wrong arguments of 'add': '1' is not of type 'integer'"),
        (call("add", a=1, c=1), "add", "Error: wrong arguments of 'add': got an unexpected keyword argument 'c'"),
        (call("greet", name="nobody"), "greet", "Error: LookupError: nobody is there"),
    ],
)
def test_bad_calls_are_answered(reply: str, name: str | None, answer: str) -> None:
    _, [step] = played(from_tools([add, greet], judge), reply + call("add", a=1))
    assert step.messages[0]["content"].startswith(answer)
    if "</tool_call>" in reply:
        assert step.messages[1] == {"role": "tool", "name": "add", "content": "2"}
    assert step.messages[0].get("name") == name
    assert (step.info, step.terminated, step.reward) == ({"tool_errors": 1}, False, 0.0)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML])
def test_calls_that_sft_teaches_are_read(template: str) -> None:
    """By our own templates, from a dataset's `tool_calls` to tokens, and from those to the reply that comes in."""
    tokenizer = train_tokenizer(["how are you"], 300)
    tokenizer.chat_template = template
    prompt = [{"role": "user", "content": "2 + 3?", "tools": [tool_schema(add), tool_schema(greet)]}]
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}},
        {"type": "function", "function": {"name": "greet", "arguments": {"name": "<|end|> é"}}},
    ]
    ids = encode_replies_to(tokenizer, [(prompt, reply_message("I call.", calls))])
    [reply] = decode_replies(tokenizer, ids)
    assert reply.startswith("I call.\n<tool_call>")
    _, [step] = played(from_tools([add, greet], judge), reply)
    assert [message["content"] for message in step.messages] == ["5", "Hello <|end|> é"]


def test_half_a_character_in_a_call_is_answered() -> None:
    _, [step] = played(from_tools([greet], judge), call("greet", name="\ud800"))
    assert step.messages == [{"role": "tool", "name": "greet", "content": "Hello \\ud800"}]


def test_templates_get_the_tool_name_of_an_answer() -> None:
    tokenizer = train_tokenizer(["how are you"], 300)
    named = CHATML.replace("message['role'] +", "message['role'] + ' ' + (message['name'] or '') +")
    tokenizer.chat_template = named.replace("<|im_start|>assistant\n", "<|im_start|>assistant \n")
    _, [step] = played(from_tools([add, greet], judge), call("greet", name="you"))
    form = chat_format(tokenizer)
    assert "tool greet\nHello you" in tokenizer.decode(form.observations(step.messages, form.end_of_turn))


def test_environments_are_made_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at a tool's types must not find torch in any of them, nor hide it from whoever comes later."""
    before, pauses, found = chat_template_utils.is_torch_available, iter((0.1, 0.3)), []

    def slow(function: Any) -> dict[str, Any]:
        time.sleep(next(pauses))
        found.append(chat_template_utils.is_torch_available())
        return {"function": {}}

    monkeypatch.setattr(chat_template_utils, "get_json_schema", slow)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(tool_schema, [add, greet]))
    assert found == [False, False]
    assert chat_template_utils.is_torch_available is before


def test_functions_that_are_no_tools() -> None:
    with pytest.raises(ValueError, match="the tool '<lambda>' has no schema"):
        from_tools([lambda x: x], judge)


def test_tools_may_be_async() -> None:
    """They wait at the same time as those of other episodes, on the loop; the others do so in threads."""

    begun: dict[str, list[int]] = {"wait": [], "block": []}

    @contextmanager
    def counted(name: str) -> Iterator[None]:
        begun[name].append(1)
        yield
        begun[name].append(-1)

    async def wait(seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        with counted("wait"):
            await asyncio.sleep(seconds)
        return "waited" if threading.current_thread() is threading.main_thread() else "elsewhere"

    def block(seconds: float) -> str:
        """Wait too.

        Args:
            seconds: How long.
        """
        with counted("block"):
            time.sleep(seconds)
        return "blocked" if threading.current_thread() is not threading.main_thread() else "the loop"

    async def later(task: Any, reply: str) -> float:
        return judge(task, reply)

    make = from_tools([wait, block], later)
    reply = call("wait", seconds=0.2) + call("block", seconds=0.2) + call("wait", seconds="x")

    async def play() -> list[Step]:
        environments = [make() for _ in range(8)]
        for environment in environments:
            environment.reset({"answer": "5"}, 0)
        return [*await asyncio.gather(*(one.step(reply) for one in environments)), await environments[0].step("5")]  # type: ignore[misc]

    *steps, last = asyncio.run(play())
    for changes in begun.values():
        assert max(itertools.accumulate(changes)) > 1
    for step in steps:
        assert [message["content"] for message in step.messages][:2] == ["waited", "blocked"]
        assert "wrong arguments of 'wait'" in step.messages[2]["content"]
        assert step.info == {"tool_errors": 1}
    assert last == Step(reward=1.0, terminated=True)


def test_tools_need_no_torch() -> None:
    code = """
import sys
from agents.environments.test_environment_adapters import add, judge
from xray_runtime.agents.environments.adapters import from_tools
from_tools([add], judge)
assert not {"torch", "ray"} & set(sys.modules)
"""
    setup = f"import sys; sys.path[:] = {sys.path!r}\n"
    subprocess.run([sys.executable, "-c", setup + code], check=True)


class Corridor:
    """Of Gymnasium's API: walk to the fourth place."""

    closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self._at = int(seed or 0)
        return self._at, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._at += action
        return self._at, int(self._at == 3), self._at == 3, False, {"at": self._at, "object": object()}

    def close(self) -> None:
        Corridor.closed = True


def move(reply: str) -> int | None:
    found = re.search(r"move (-?\d+)", reply)
    return int(found[1]) if found else None


def test_gymnasium() -> None:
    environment: Any = from_gymnasium(Corridor, move, "You are at {}.".format)()
    system = {"role": "system", "content": "s"}
    task = {"prompt": "p", "messages": [system, {"role": "user", "content": "Walk."}]}
    start = as_start(environment.reset(task, 1))
    assert start.messages == [system, {"role": "user", "content": "Walk.\n\nYou are at 1."}]
    assert task["messages"][-1] == {"role": "user", "content": "Walk."}
    asked = {"role": "user", "content": "Walk.", "tools": [tool_schema(add)]}
    start = as_start(environment.reset({"prompt": "p", "messages": [asked]}, 1))
    assert start.messages == [asked | {"content": "Walk.\n\nYou are at 1."}]
    assert as_step(environment.step("I think")) == Step([{"role": "user", "content": NO_ACTION}])
    last = Step([{"role": "user", "content": "You are at 3."}], 1.0, terminated=True, info={"at": 3})
    assert as_step(environment.step("move 2")) == last
    environment.close()
    assert Corridor.closed
