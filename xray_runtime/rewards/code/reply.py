"""The process of a reply: it runs the reply's code, then answers requests of the tests until it is killed.

    ["name", name] ["call", n, args, kwargs] ["attribute", n, name] ["list", n]

Each is answered with ["value", v] or ["error", name of the exception, text]; the first message is the result of loading
the code. The reply can change anything here, so this process knows no test, expected value or verdict.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import ModuleType
from typing import Any, NoReturn

from xray_runtime.rewards.code.values import Channel, decode, encode

TEXT_CHARS = 300
"""Limit of an exception's text."""


def load(code: str, name: str) -> dict[str, Any]:
    """Run `code` as the module `name`; returns its names."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(code, "<reply>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def run(code: str) -> NoReturn:
    """Run `code` as a program, and exit with its exit code."""
    status: Any = 1
    try:
        load(code, "__main__")
        atexit._run_exitfuncs()
        status = 0
    except SystemExit as end:
        status = 0 if end.code is None else end.code
    except BaseException:
        pass
    try:
        sys.stdout.flush()
    except BaseException:  # it exceeds the limit of output
        status = 1
    os._exit(status if isinstance(status, int) else 1)


def answer(code: str, channel: Channel) -> None:
    """Load the code and answer requests."""
    space: dict[str, Any] = {}
    objects: list[Any] = []

    def keep(value: Any) -> list[Any]:
        objects.append(value)
        return ["object", len(objects) - 1, type(value).__name__]

    def plain(data: Any) -> Any:
        return decode(data, lambda kept: objects[kept[0]])

    def do(request: list[Any]) -> Any:
        nonlocal space
        match request:
            case ["load"]:
                space = load(code, "reply")
                return None
            case ["name", name]:
                if name not in space:
                    raise NameError(f"name {name!r} is not defined")
                return space[name]
            case ["call", number, args, kwargs]:
                return objects[number](*plain(args), **plain(kwargs))
            case ["attribute", number, name]:
                return getattr(objects[number], name)
            case ["list", number]:
                return list(objects[number])
        raise ValueError(f"unknown request {request}")

    request: list[Any] = ["load"]
    while True:
        try:
            channel.send(["value", encode(do(request), keep)])
        except BaseException as error:  # SystemExit too
            channel.send(["error", type(error).__name__, _text(error)])
        request = channel.receive()


def _text(error: BaseException) -> str:
    try:
        return str(error)[:TEXT_CHARS]
    except BaseException:  # of the reply's __str__
        return ""
