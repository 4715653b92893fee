"""Odd requests to the gateway: never a 500, and no other client is delayed."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.unit.agents.parts import LIMITS, World
from xray_runtime.agents.segments import Tree

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def nested(levels: int, leaf: Any = 1) -> Any:
    for _ in range(levels):
        leaf = {"a": leaf}
    return leaf


def deep(levels: int, begin: str = "[", end: str = "]") -> bytes:
    return (begin * levels + "1" + end * levels).encode()


ODD: dict[str, Any] = {
    "a schema of 900 levels": {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(900)}}]},
    "metadata of 900 levels": {"metadata": nested(900)},
    "arguments of 900 levels": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": nested(900)}}],
            },
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ]
    },
    "lists of 100,000 levels": deep(100_000),
    "objects of 990 levels": deep(990, '{"a":', "}"),
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "a lone surrogate in a name": b'{"messages": [{"role": "user", "content": "a"}], "\\ud800": 1}',
    "a lone surrogate in a stop": b'{"messages": [{"role": "user", "content": "a"}], "stop": ["\\ud800"]}',
    "no UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "nothing": b"",
    "null": b"null",
    "a number of 5,000 digits": b'{"max_tokens": ' + b"9" * 5000 + b"}",
    "a prompt of 4 MB": {"messages": [{"role": "user", "content": "a b " * 1_000_000}]},
    "NaN": b'{"top_p": NaN}',
    "an infinite exponent": b'{"temperature": 1e999}',
    "messages as an object": {"messages": {"role": "user"}},
    "a message as a list": {"messages": [["user", "hi"]]},
    "content as null": {"messages": [{"role": "user", "content": None}]},
    "content as parts of null": {"messages": [{"role": "user", "content": [None]}]},
    "a role as an object": {"messages": [{"role": {}, "content": "hi"}]},
    "calls as a number": {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": 7}, USER]},
    "a call's id as an object": {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"id": {}, "function": {"name": "f"}}]}, USER]
    },
    "a call's name as an object": {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": {}}}]}, USER]
    },
    "a result's id as a list": {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": [1]}]},
    "a tool without a function": {"messages": [USER], "tools": [{"type": "function"}]},
    "a tool's name as a list": {"messages": [USER], "tools": [{"type": "function", "function": {"name": [1]}}]},
    "stops as objects": {"messages": [USER], "stop": [{}]},
    "n of 10^18": {"messages": [USER], "n": 10**18},
    "max_tokens of 10^300": {"messages": [USER], "max_tokens": 10**300},
    "a temperature of 1e308": {"messages": [USER], "temperature": 1e308},
    "top_k of a half": {"messages": [USER], "top_k": 1.5},
    "a choice of an object": {"messages": [USER], "tool_choice": {"type": {}}},
    "logit_bias as a list": {"messages": [USER], "logit_bias": [1]},
    "an unknown field": {"messages": [USER], "zap": nested(3)},
    "stream as an object": {"messages": [USER], "stream": {}},
    "tokens that are none": {"prompt": [10**30]},
    "negative tokens": {"prompt": [-1]},
    "tokens as texts": {"prompt": ["a"]},
    "a million tokens": {"prompt": [1] * 1_000_000},
    "input as null": {"input": [None]},
    "input of a call": {"input": [{"type": "function_call", "name": 3, "arguments": 4}]},
    "blocks as null": {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": 1, "input": 2}]}]},
    "system as an object": {"system": {}, "messages": [USER]},
    "info of null": {"value": 1, "info": [None]},
}
PATHS = ("v1/chat/completions", "v1/completions", "v1/responses", "v1/messages", "reward")
HEADERS: list[dict[str, str]] = [
    {"x-stainless-retry-count": "9" * 5000},
    {"content-encoding": "gzip"},
    {"authorization": "Bearer"},
    {"authorization": "Basic \xff"},
]


@pytest.mark.parametrize("name", ODD)
def test_no_request_makes_the_gateway_fail(name: str, world: World) -> None:
    body = ODD[name] if isinstance(ODD[name], bytes) else json.dumps(ODD[name]).encode()
    with httpx.Client(timeout=60) as client:
        for path in PATHS:
            episode = world.open(path.replace("/", "-"), replace(LIMITS, leave_out=True))
            url = f"{world.gateway.url(episode)}/{path}"
            answer = client.post(url, content=body, headers={"x-api-key": episode.secret})
            assert answer.status_code < 500, (path, answer.text)
            if answer.status_code >= 400:
                assert "\n" not in answer.json()["error"]["message"]
                assert len(answer.text) < 2000
        # The generator is as well as before.
        after = world.open("after")
        answer = client.post(
            f"{world.gateway.url(after)}/v1/chat/completions",
            json={"messages": [USER], "max_tokens": 3},
            headers={"x-api-key": after.secret},
        )
        assert answer.status_code == 200, answer.text


def test_no_header_path_or_method_makes_the_gateway_fail(world: World) -> None:
    episode = world.open(limits=replace(LIMITS, leave_out=True))
    base = world.gateway.url(episode)
    with httpx.Client(timeout=60) as client:
        for headers in HEADERS:
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            given = {"x-api-key": episode.secret.encode()} | encoded
            answer = client.post(f"{base}/v1/chat/completions", json={"messages": [USER]}, headers=given)
            assert answer.status_code < 500, headers
        for path in ("", "/v1", "/%00", "/..%2f..", "/v1/chat/completions/x", "/\u202e"):
            for method in ("GET", "POST", "ZAP"):
                answer = client.request(method, base + path, headers={"x-api-key": episode.secret})
                assert answer.status_code < 500, (method, path)


def test_others_are_answered_while_a_request_is_brought_into_tokens(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = world.open("slow"), world.open("other")
    begun, goes_on = threading.Event(), threading.Event()
    place = Tree.place

    def placed(tree: Tree, request: Any) -> Any:
        if tree is slow._tree:
            begun.set()
            assert goes_on.wait(60)
        return place(tree, request)

    monkeypatch.setattr(Tree, "place", placed)

    def ask(episode: Any, text: str = "hi") -> int:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
        url, headers = f"{world.gateway.url(episode)}/v1/chat/completions", {"x-api-key": episode.secret}
        return httpx.post(url, json=body, headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(8) as threads:
        held = [threads.submit(ask, slow, f"hi {number}") for number in range(6)]
        assert begun.wait(60)
        assert [ask(other) for _ in range(3)] == [200] * 3
        assert not any(one.done() for one in held)
        goes_on.set()
        assert [one.result(60) for one in held] == [200] * 6


def test_requests_that_cannot_fit_are_not_tokenized(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "place", lambda tree, request: pytest.fail("it was"))
    episode = world.open()
    for path, body in {
        "chat/completions": {"messages": [{"role": "user", "content": "a" * 4_000_000}]},
        "completions": {"prompt": "a" * 4_000_000},
        "responses": {"input": "a" * 4_000_000},
        "messages": {"messages": [{"role": "user", "content": "a" * 4_000_000}], "max_tokens": 5},
    }.items():
        url, headers = f"{world.gateway.url(episode)}/v1/{path}", {"x-api-key": episode.secret}
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 400
        assert "the prompt's 4,000,000 characters are more than the context's 20000 tokens can hold" in answer.text
