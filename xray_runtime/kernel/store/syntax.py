"""The code of one Python file: the digest of its syntax tree, and the modules it imports.

The digest leaves out comments, line numbers and docstrings. Imports inside functions count; a block
`if TYPE_CHECKING:` does not, since it never runs.

A module that imports by a name made at run time (`importlib.import_module(name)`) must declare what it may import at
module level: `USES = ("package.module", ...)`. An empty tuple means that everything is digested in another way.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from xray_runtime.kernel.store.syntax_memory import syntax_memory

IMPORTERS = ("import_module", "__import__")
DECLARATION = "USES"


class CodeDigestError(ValueError):
    """Code cannot be digested from its source; one line that names the place and the remedy."""


class Import(NamedTuple):
    """One import as a file writes it."""

    module: str
    """With its leading dots."""
    names: tuple[str, ...] = ()
    """The names after `import` in `from module import ...`, `*` included."""


@dataclass(frozen=True)
class Syntax:
    """The syntax of a file, whatever the module is called."""

    digest: str
    imports: tuple[Import, ...]
    exports: tuple[str, ...]
    """Strings in `__all__`: `from package import *` imports those that are modules."""
    uses: tuple[str, ...] | None
    """Modules declared in USES; None without a declaration."""
    unreadable_line: int | None
    """First line that imports by a name made at run time."""


def read_syntax(path: Path) -> Syntax:
    """The syntax of a file, parsed again only after the file changed. Raises CodeDigestError: it cannot be read or
    parsed, or USES is not a tuple of strings."""
    try:
        stat = path.stat()
        return _read(path, (stat.st_size, stat.st_mtime_ns, stat.st_ino))
    except CodeDigestError:
        raise
    except (OSError, SyntaxError, ValueError) as error:
        raise CodeDigestError(f"{path}: cannot be read as Python ({' '.join(str(error).split())})") from error


def keep_syntax() -> None:
    """Remember the syntax of the files read so far, for other processes."""
    syntax_memory(Path(__file__)).keep()


@cache
def _read(path: Path, version: tuple[int, int, int]) -> Syntax:
    source, memory = path.read_bytes(), syntax_memory(Path(__file__))
    sha256 = hashlib.sha256(source).hexdigest()
    if (known := memory.recall(path, sha256)) is not None:
        digest, imports, exports, uses, unreadable_line = known
        loaded = tuple(Import(module, tuple(names)) for module, names in imports)
        return Syntax(digest, loaded, tuple(exports), None if uses is None else tuple(uses), unreadable_line)
    syntax = syntax_of(ast.parse(source), str(path))
    memory.remember(path, sha256, [*vars(syntax).values()])
    return syntax


def syntax_of(tree: ast.Module, where: str) -> Syntax:
    """The syntax of a tree, whose docstrings are removed. Raises CodeDigestError: USES is not a tuple of strings."""
    nodes = list(_running(tree))
    importers = {"__import__"}
    bound = dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "importlib":
            importers |= {alias.asname or alias.name for alias in node.names if alias.name in IMPORTERS}
        elif isinstance(node, ast.Import):
            bound |= {a.asname: a.name for a in node.names if a.asname}
            bound |= {top: top for a in node.names if not a.asname for top in [a.name.partition(".")[0]]}
    imports, called, unreadable = dict[Import, None](), set[int](), list[int]()
    for node in nodes:
        if isinstance(node, ast.Import):
            imports |= {Import(alias.name): None for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            imports[Import("." * node.level + (node.module or ""), names)] = None
        elif isinstance(node, ast.Call) and _imports(node.func, importers) and (literal := _literal_import(node)):
            imports[literal] = None
            called.add(id(node.func))
        elif isinstance(node, ast.expr) and _imports(node, importers) and id(node) not in called:
            unreadable.append(node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            # `p.q` reaches the module p.q, where it is one: a package may import it on access.
            imports[Import(f"{bound[node.value.id]}.{node.attr}")] = None
    return Syntax(tree_digest(tree), tuple(imports), _exports(tree), _uses(tree, where), min(unreadable, default=None))


def tree_digest(tree: ast.AST) -> str:
    """sha256 of a syntax tree without line numbers and, unless the code reads `__doc__`, without docstrings.

    Every statement that is only a string is a docstring: those below an attribute document it.
    """
    nodes = [tree]
    for node in nodes:
        nodes += _children(node)
    if not any("__doc__" in _names(node) for node in nodes):
        for node in nodes:
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    setattr(node, field, [s for s in statements if not _is_docstring(s)])
    return hashlib.sha256(ast.dump(tree, include_attributes=False).encode("utf-8", "backslashreplace")).hexdigest()


def _names(node: ast.AST) -> tuple[object, ...]:
    return getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "value", None)


def _is_docstring(statement: ast.AST) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node except those that only a type checker reads, each before its children."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in _names(node.test):
            waiting.extend(node.orelse)
        else:
            waiting += _children(node)


def _children(node: ast.AST) -> list[ast.AST]:
    """As `ast.iter_child_nodes`, without contexts (Load, Store) and without its generators, which are slow."""
    children: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            children += [child for child in value if isinstance(child, ast.AST)]
        elif isinstance(value, ast.AST) and name != "ctx":
            children.append(value)
    return children


def _imports(node: ast.AST, importers: Collection[str]) -> bool:
    """Whether an expression is a function that imports."""
    if isinstance(node, ast.Name):
        return node.id in importers and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Attribute) and node.attr in IMPORTERS


def _literal_import(call: ast.Call) -> Import | None:
    """The import of a call with literal names; None where a name is made at run time."""
    match call.args if not call.keywords else []:
        case [ast.Constant(value=str(name))] if not name.startswith("."):
            return Import(name)
        case [ast.Constant(value=str(name)), ast.Name(id="__package__")] if name.startswith("."):
            return Import(name)
        case [ast.Constant(value=str(name)), ast.Constant(value=str(package))] if name.startswith("."):
            return Import(importlib.util.resolve_name(name, package))
    return None


def _assigned(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    """Every value assigned to `name` at module level."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(t, ast.Name) and t.id == name for t in targets):
            yield value


def _exports(tree: ast.Module) -> tuple[str, ...]:
    constants = [c for value in _assigned(tree, "__all__") for c in ast.walk(value) if isinstance(c, ast.Constant)]
    return tuple(c.value for c in constants if isinstance(c.value, str))


def _uses(tree: ast.Module, where: str) -> tuple[str, ...] | None:
    declared: list[str] | None = None
    for value in _assigned(tree, DECLARATION):
        elements = value.elts if isinstance(value, ast.Tuple) else [value]
        names = [e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)]
        if not isinstance(value, ast.Tuple) or len(names) != len(elements):
            raise CodeDigestError(
                f'{where}, line {value.lineno}: {DECLARATION} must be a tuple of module names: ("package.module",)'
            )
        declared = [*(declared or []), *names]
    return None if declared is None else tuple(declared)
