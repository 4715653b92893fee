"""The digest of a function that lies in no module: of a notebook, a script or a closure. Its source is what it is.

With the source go the values it was made with: defaults, the variables around it, and the globals it reads, as far as
they are plain constants or functions of the same sort. Classes and functions of modules count as those modules.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import hashlib
import inspect
import json
import linecache
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from xray_runtime.store.libraries import top_of
from xray_runtime.store.module_graph import Finder, targets
from xray_runtime.store.syntax import CodeDigestError, syntax_of, tree_digest

SCALARS = (bool, int, float, str, bytes, type(None))
REMEDY = "put the function into a module and name it as 'module:function'"


@dataclass(frozen=True)
class FunctionCode:
    """What a function computes by."""

    digests: dict[str, str]
    """`module:name` → digest of source and values; empty for a function that its module holds under its name."""
    modules: set[str]
    """Modules it reaches."""


def digest_function(function: Any) -> FunctionCode:
    """What `function` computes by.

    Raises:
        CodeDigestError: its source cannot be had, or it reads a value that is no plain constant and no function.
    """
    walk = _Walk()
    description = walk.value(function, "the function", getattr(function, "__qualname__", repr(function)))
    digests = {}
    if walk.parts:
        text = json.dumps([description, walk.parts])
        digests[f"{function.__module__}:{function.__qualname__}"] = hashlib.sha256(text.encode()).hexdigest()
    return FunctionCode(digests, walk.modules)


def function_sources(function: Any) -> dict[str, str]:
    """File name → text that `digest_function` reads of it, for `remember_sources` in a process that lacks the file.

    Of a notebook's cell there is no file but in the process that ran it; a script may lie on one node alone.

    Raises:
        CodeDigestError: as `digest_function`.
    """
    walk = _Walk()
    walk.value(function, "the function", getattr(function, "__qualname__", repr(function)))
    return {file: "".join(linecache.getlines(file)) for file in sorted(walk.files)}


def remember_sources(sources: Mapping[str, str]) -> None:
    """Have the files of `function_sources` read as they were there."""
    for file, text in sources.items():
        # Without a time of change it is never looked for on disk.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


class _Walk:
    """One pass over a function and the functions it uses, each described once."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.modules: set[str] = set()
        self.files: set[str] = set()
        self._numbers: dict[int, int] = {}
        self._finder = Finder()

    def value(self, value: Any, what: str, where: str) -> Any:
        """JSON that is equal for equal values."""
        if type(value) in SCALARS:
            return [type(value).__name__, repr(value)]
        if type(value) in (list, tuple):
            return [type(value).__name__, [self.value(v, what, where) for v in value]]
        if type(value) in (set, frozenset):
            # Their order differs from process to process.
            return [type(value).__name__, sorted(json.dumps(self.value(v, what, where)) for v in value)]
        if type(value) is dict:
            return ["dict", [[self.value(x, what, where) for x in item] for item in value.items()]]
        if isinstance(value, functools._lru_cache_wrapper):
            return self.value(value.__wrapped__, what, where)
        if isinstance(value, ModuleType):
            return self._reached(value.__name__, "")
        if self._is_named(value):
            return self._reached(value.__module__, value.__qualname__)
        if isinstance(value, FunctionType):
            return self._function(value)
        raise CodeDigestError(f"{where}: {what} is a {type(value).__name__}, which cannot be digested; {REMEDY}")

    def _reached(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return ["of", module, name]

    def _is_named(self, value: Any) -> bool:
        """Whether a module on disk, or the interpreter, holds `value` under its name."""
        if not isinstance(value, type | FunctionType | BuiltinFunctionType) or not isinstance(value.__module__, str):
            return False
        held: Any = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            held = getattr(held, part, None)
        return held is value and self._is_on_disk(value.__module__)

    def _is_on_disk(self, module: str) -> bool:
        return module != "__main__" and self._is_module(module)

    def _function(self, function: FunctionType) -> Any:
        if id(function) in self._numbers:
            return ["function", self._numbers[id(function)]]
        number = self._numbers[id(function)] = len(self.parts)
        self.parts.append(None)  # its place, should it call itself
        where, code = function.__qualname__, function.__code__
        node = _source(function)
        self.files.add(code.co_filename)
        module = ast.Module([node if isinstance(node, ast.stmt) else ast.Expr(node)], [])
        syntax = syntax_of(module, where)
        if syntax.unreadable_line is not None:
            raise CodeDigestError(f"{where}: imports a module by a name only known at run time; {REMEDY}")
        for statement in syntax.imports:
            if statement.level:
                raise CodeDigestError(f"{where}: a relative import; {REMEDY}")
            self.modules.update(t for t in targets(statement, where, False, self._finder) if self._is_module(t))
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                held = function.__globals__.get(part.value.id)
                if isinstance(held, ModuleType) and self._finder.find(name := f"{held.__name__}.{part.attr}"):
                    self.modules.add(name)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        values = {f"variable {name!r}": cell.cell_contents for name, cell in cells.items()}
        values |= {"the defaults": function.__defaults__, "the keyword defaults": function.__kwdefaults__}
        if self._is_on_disk(function.__module__):
            # Its globals are the module's, and in the module's digest.
            self.modules.add(function.__module__)
        else:
            values |= {f"global {name!r}": found for name, found in _globals_read(function)}
        described = {what: self.value(value, what, where) for what, value in sorted(values.items())}
        self.parts[number] = [tree_digest(node), described]
        return ["function", number]

    def _is_module(self, name: str) -> bool:
        return top_of(name) in sys.stdlib_module_names or self._finder.find(name) is not None


def _source(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda:
    """The syntax tree of one function."""
    name = function.__qualname__
    try:
        # Of the code, not of the function: a decorated function would answer with what it decorates.
        source = inspect.getsource(function.__code__)
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError) as error:
        raise CodeDigestError(f"{name}: its source is not available; {REMEDY}") from error
    if function.__code__.co_name == "<lambda>":
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        if len(lambdas) != 1:
            raise CodeDigestError(f"{name}: its line has {len(lambdas)} lambdas, which cannot be told apart; use def")
        return lambdas[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function.__code__.co_name:
            return node
    raise CodeDigestError(f"{name}: its source is not available; {REMEDY}")


def _globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in sorted(set(_names_read(function.__code__))):
        if name in function.__globals__:
            yield name, function.__globals__[name]
        elif not hasattr(builtins, name):
            raise CodeDigestError(f"{function.__qualname__}: global {name!r} is not defined")


def _names_read(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_read(constant)
