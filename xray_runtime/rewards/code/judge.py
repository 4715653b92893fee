"""The process of the tests, which call the reply's functions through a proxy and get plain values.

A name that the tests neither define nor import, and that is not a builtin, belongs to the reply. If the tests use no
such name, builtins do too (`assert sum(10, 15) == 6`). In `math.isclose(f(1), 2)` the module is Python's.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import symtable
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from xray_runtime.rewards.code.values import Channel, decode, encode

USES: tuple[str, ...] = ()
"""Only modules of the standard library are imported by name here, and a key has Python's version."""
TESTS = "<tests>"
WHY_CHARS = 300
"""Limit of a verdict's text, so that one write is enough."""
PLAIN_ONLY = "bool eq ne lt le gt ge len getitem contains int float index add radd sub rsub mul rmul neg format str"
"""Operators that proxies of the reply's objects do not support."""


class CodeError(Exception):
    """The reply's code raised an exception that is not built into Python."""


class Judge:
    """One run of tests, after which the process ends.

    Args:
        channel: channel to the process of the reply.
        verdict: file descriptor for the line {"passed": bool, "why": …} or {"unusable": why}.
    """

    def __init__(self, channel: Channel, verdict: int) -> None:
        self._channel, self._verdict = channel, verdict
        self._asked = False

    def run(self, tests: str) -> NoReturn:
        """Run the tests against the code of the reply."""
        try:
            compiled = compile(tests, TESTS, "exec", dont_inherit=True)
            space = _Space(self, tests)
        except (SyntaxError, ValueError, RecursionError) as error:
            self._end(unusable=f"the tests cannot be read ({error})")
        try:
            self._answer()
        except Exception as error:
            self._end(passed=False, why=f"the code does not load: {_described(error)}")
        try:
            exec(compiled, space)
        except BaseException as error:  # SystemExit too
            frames = traceback.walk_tb(error.__traceback__)
            lines = [line for frame, line in frames if frame.f_code.co_filename == TESTS]
            place = f"line {lines[-1]} of the tests: " if lines else ""
            self._end(passed=False, why=f"{place}{_described(error)}")
        if not self._asked:
            self._end(unusable="the tests do not use the code; if they define check(candidate), end with check(NAME)")
        self._end(passed=True)

    def ask(self, *request: Any) -> Any:
        """The answer of the reply's process; raises its exceptions."""
        self._asked = True
        try:
            self._channel.send(request)
        except OSError:
            self._gone()
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, *rest = self._channel.receive()
            if kind == "value":
                [data] = rest
                return decode(data, lambda kept: Remote(self, int(kept[0]), str(kept[1])))
            name, text = map(str, rest)
        except EOFError:
            self._gone()
        except (ValueError, TypeError, RecursionError):
            self._end(passed=False, why="the code's result cannot be sent: it is nested too deeply, or is not valid")
        raise _exception(name, text)

    def encoded(self, value: Any) -> Any:

        def keep(held: Any) -> list[Any]:
            if not isinstance(held, Remote):
                kind = type(held).__name__
                self._end(
                    unusable=f"the tests pass an object of class {kind!r} to the code: only plain values are allowed"
                )
            return ["object", object.__getattribute__(held, "_number")]

        return encode(value, keep)

    def _gone(self) -> NoReturn:
        # Not an exception, which the tests could catch.
        self._end(passed=False, why="the code ended its process")

    def _end(self, **verdict: Any) -> NoReturn:
        os.write(self._verdict, json.dumps(verdict).encode() + b"\n")
        os._exit(0)


class Remote:
    """A proxy of the reply's function or object, with calls, attributes and iteration."""

    __slots__ = ("_judge", "_kind", "_number")

    def __init__(self, judge: Judge, number: int, kind: str) -> None:
        self._judge, self._number, self._kind = judge, number, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._judge.ask("call", self._number, self._judge.encoded(args), self._judge.encoded(kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._judge.ask("attribute", self._number, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._judge.ask("list", self._number))


def _not_plain(remote: Remote, *_: Any) -> NoReturn:
    raise TypeError(f"an object of class {remote._kind!r} cannot be sent: tests only get plain values")


for _operator in PLAIN_ONLY.split():
    setattr(Remote, f"__{_operator}__", _not_plain)


class _Space(dict[str, Any]):
    """The namespace of the tests; missing names come from the reply or the standard library."""

    def __init__(self, judge: Judge, tests: str) -> None:
        super().__init__(__name__="__main__")
        self._judge = judge
        names = _missing_names(tests)
        nodes = list(ast.walk(ast.parse(tests)))
        read = [node.id for node in nodes if isinstance(node, ast.Name)]
        through = [
            node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        ]
        self._modules = {n for n in names & sys.stdlib_module_names if read.count(n) == through.count(n)}
        known = {name for name in names if hasattr(builtins, name)}
        self._theirs = (names - self._modules - known) or known

    def __missing__(self, name: str) -> Any:
        if name in self._theirs:
            return self._judge.ask("name", name)
        if name in self._modules:
            return importlib.import_module(name)
        raise KeyError(name)


def _missing_names(tests: str) -> set[str]:
    """The global names that the tests read but do not bind."""

    def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
        yield table
        for inner in table.get_children():
            yield from tables(inner)

    top = symtable.symtable(tests, TESTS, "exec")
    names = [s for table in tables(top) for s in table.get_symbols() if table is top or s.is_global()]
    bound = {s.get_name() for s in names if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return {s.get_name() for s in names if s.is_referenced()} - bound


def _exception(name: str, text: str) -> Exception:
    """Python's exception of that name, or a CodeError."""
    kind = getattr(builtins, name, None)
    try:
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(text)
    except TypeError:  # it needs more than a text
        pass
    return CodeError(f"{name}: {text}")


def _described(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.removesuffix(":")[:WHY_CHARS]
