"""The process of a reply: it runs the reply's code, then answers requests of the tests until it is killed.

    ["name", name] ["call", n, args, kwargs] ["attribute", n, name] ["list", n]

Each is answered with ["value", v] or ["error", name of the exception, text]; the first message is the result of loading
the code. The reply can change anything here, so this process knows no test, expected value or verdict.
"""

from __future__ import annotations

import atexit
import builtins
import errno
import io
import os
import sys
from types import ModuleType
from typing import Any, NoReturn

from xray_runtime.rewards.code.values import Channel, decode, encode

STDIN = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
REFUSED = {201: "threads", 202: "files, processes or sockets", 203: "modules that are not loaded"}
"""Exit code of a program → what it uses that the sandbox does not have."""
IS_REFUSED = "which the sandbox refuses"
TEXT_CHARS = 300
"""Limit of an exception's text."""


def refused(error: BaseException) -> int | None:
    """The exit code in `REFUSED` for an error that comes from the sandbox, as far as can be told."""
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return 201
    if isinstance(error, OSError) and error.errno == errno.EPERM:
        return 202
    return 203 if isinstance(error, ImportError) else None


def provide_stdin() -> None:
    """Let `/dev/stdin` be opened, as programs do to read their input."""
    opened = builtins.open

    def open_stdin(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike) and os.fspath(file) in STDIN:
            return opened(0, *args, **kwargs | {"closefd": False})
        return opened(file, *args, **kwargs)

    builtins.open = io.open = open_stdin


def load(code: str, name: str) -> dict[str, Any]:
    """Run `code` as the module `name`; returns its names."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(code, "<reply>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def run(code: str) -> NoReturn:
    """Run `code` as a program, and exit with its exit code."""
    status: Any = 1
    provide_stdin()
    try:
        load(code, "__main__")
        atexit._run_exitfuncs()
        status = 0
    except SystemExit as end:
        status = 0 if end.code is None else end.code
    except BaseException as error:
        status = refused(error) or 1
    try:
        sys.stdout.flush()
    except BaseException:  # it exceeds the limit of output
        status = 1
    os._exit(status if isinstance(status, int) else 1)


def answer(code: str, channel: Channel) -> None:
    """Load the code and answer requests."""
    provide_stdin()
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
            number = refused(error)
            note = f" (the code uses {REFUSED[number]}, {IS_REFUSED})" if number else ""
            channel.send(["error", type(error).__name__, _text(error)[: TEXT_CHARS - 2 * len(note)] + note])
        request = channel.receive()


def _text(error: BaseException) -> str:
    try:
        return str(error)[:TEXT_CHARS]
    except BaseException:  # of the reply's __str__
        return ""
