"""The digest of a function outside of any module: in a notebook, a script or a closure.

It covers the source and the values the function was made with: its defaults, the variables around it, and the globals
it reads. They must be plain constants or functions of the same sort; classes and functions of modules count as those
modules.
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
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from xray_runtime.kernel.store.libraries import top_of
from xray_runtime.kernel.store.module_graph import Finder, targets
from xray_runtime.kernel.store.syntax import CodeDigestError, syntax_of, tree_digest

SCALARS = (bool, int, float, str, bytes, type(None))
REMEDY = "put the function into a module and name it as 'module:function'"


def digest_function(function: Any) -> tuple[dict[str, str], set[str]]:
    """(`module:name` → digest of source and values, modules reached) of a function.

    There is no digest where a module holds the function under its name. Raises CodeDigestError: its source is not
    available, or it reads a value that is neither a constant nor a function.
    """
    walk, description = _walked(function)
    if not walk.parts:
        return {}, walk.modules
    digest = hashlib.sha256(json.dumps([description, walk.parts]).encode()).hexdigest()
    return {f"{function.__module__}:{function.__qualname__}": digest}, walk.modules


def function_sources(function: Any) -> dict[str, str]:
    """File name → text that `digest_function` reads, for `remember_sources` in a process that lacks the file.

    A notebook's cell has a file only in the process that ran it; a script may lie on one node alone. Raises
    CodeDigestError: as `digest_function`.
    """
    walk, _ = _walked(function)
    return {file: "".join(linecache.getlines(file)) for file in sorted(walk.files)}


def remember_sources(sources: Mapping[str, str]) -> None:
    """Make the files of `function_sources` readable in this process."""
    for file, text in sources.items():
        # An entry without a modification time is never looked for on disk.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def _walked(function: Any) -> tuple[_Walk, Any]:
    walk = _Walk()
    return walk, walk.value(function, "the function", getattr(function, "__qualname__", repr(function)))


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
        self.parts.append(None)  # filled in below; it may call itself
        where, code = function.__qualname__, function.__code__
        node = _source(function)
        self.files.add(code.co_filename)
        module = ast.Module([node if isinstance(node, ast.stmt) else ast.Expr(node)], [])
        syntax = syntax_of(module, where)
        if syntax.unreadable_line is not None:
            raise CodeDigestError(f"{where}: imports a module by a name made at run time; {REMEDY}")
        for statement in syntax.imports:
            if statement.module.startswith("."):
                raise CodeDigestError(f"{where}: a relative import; {REMEDY}")
            self.modules.update(t for t in targets(statement, "", self._finder) if self._is_module(t))
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
        # A decorated function would give the source of what it decorates; its code gives its own.
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
