"""One Python file as it computes: the digest of its syntax tree, what it imports, and whether all of that can be read.

Comments, line numbers and docstrings are not part of the digest; imports inside functions are part of what is
imported; a block `if TYPE_CHECKING:` is not, since it never runs.

A module that imports by a name made at run time (`importlib.import_module(name)`) must say what it may reach, in a
line of its own at module level: `USES = ("package.module", ...)`. The empty tuple says: nothing that is not digested
in another way.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

IMPORTERS = ("import_module", "__import__")
DECLARATION = "USES"


class CodeDigestError(ValueError):
    """What code computes cannot be told from its source; one line that names the place and the remedy."""


@dataclass(frozen=True)
class Import:
    """One import as it stands in a file."""

    module: str
    names: tuple[str, ...] = ()
    """What follows `import` in `from module import ...`; `*` included."""
    level: int = 0
    """Leading dots."""


@dataclass(frozen=True)
class Syntax:
    """What a file says, whatever the module is called."""

    digest: str
    imports: tuple[Import, ...]
    exports: tuple[str, ...]
    """Strings in `__all__`: what `from package import *` imports where they are modules."""
    uses: tuple[str, ...] | None
    """Modules declared in USES; None without a declaration."""
    unreadable_line: int | None
    """First line that imports a name only known at run time."""


_KNOWN: dict[str, tuple[tuple[int, int, int], Syntax]] = {}


def read_syntax(path: Path) -> Syntax:
    """What `path` says, parsed again only after the file changed.

    Raises:
        CodeDigestError: it cannot be read or parsed, or declares USES in another form than a tuple of strings.
    """
    try:
        stat = path.stat()
        version = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        known = _KNOWN.get(str(path))
        if known is None or known[0] != version:
            known = _KNOWN[str(path)] = (version, syntax_of(ast.parse(path.read_bytes()), str(path)))
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, CodeDigestError):
            raise
        raise CodeDigestError(f"{path}: cannot be read as Python ({' '.join(str(error).split())})") from error
    return known[1]


def syntax_of(tree: ast.Module, where: str) -> Syntax:
    """What `tree` says; its docstrings are removed from it.

    Raises:
        CodeDigestError: it declares USES in another form than a tuple of strings.
    """
    nodes = list(_running(tree))
    imports = [Import(alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imports += [
        Import(node.module or "", tuple(alias.name for alias in node.names), node.level)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
    ]
    # `import p` and then `p.q` reaches the module p.q, where it is one: packages may import it when it is asked for.
    bound = {
        a.asname or a.name.partition(".")[0]: a for node in nodes if isinstance(node, ast.Import) for a in node.names
    }
    imports += [
        Import(f"{bound[node.value.id].name if bound[node.value.id].asname else node.value.id}.{node.attr}")
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound
    ]
    literal, unreadable_line = _imports_by_call(nodes)
    return Syntax(
        digest=tree_digest(tree),
        imports=tuple(dict.fromkeys([*imports, *literal])),
        exports=_exports(tree),
        uses=_uses(tree, where),
        unreadable_line=unreadable_line,
    )


def tree_digest(tree: ast.AST) -> str:
    """sha256 of a syntax tree without places and, unless the code reads `__doc__`, without docstrings.

    Every statement that is only a string is taken for one: those below an attribute document it.
    """
    if not any(_reads_docstrings(node) for node in ast.walk(tree)):
        for node in ast.walk(tree):
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    setattr(node, field, [s for s in statements if not _is_docstring(s)])
    return hashlib.sha256(ast.dump(tree, include_attributes=False).encode("utf-8", "backslashreplace")).hexdigest()


def _is_docstring(statement: ast.AST) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _reads_docstrings(node: ast.AST) -> bool:
    return "__doc__" in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "value", None))


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker reads."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.If):
            waiting.extend(ast.iter_child_nodes(node))
        elif _is_type_checking(node.test):
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def _is_type_checking(test: ast.AST) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _imports_by_call(nodes: list[ast.AST]) -> tuple[list[Import], int | None]:
    """(imports by calls with a literal name, first line of any other use of the functions that import)."""
    names = {"__import__"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "importlib":
            names |= {alias.asname or alias.name for alias in node.names if alias.name in IMPORTERS}
    found: list[Import] = []
    read: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and _imports(node.func, names) and (literal := _literal_import(node)):
            found.append(literal)
            read.add(id(node.func))
    lines = [n.lineno for n in nodes if isinstance(n, ast.expr) and _imports(n, names) and id(n) not in read]
    return found, min(lines, default=None)


def _imports(node: ast.AST, names: Iterable[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Attribute) and node.attr in IMPORTERS


def _literal_import(call: ast.Call) -> Import | None:
    if call.keywords or len(call.args) not in (1, 2):
        return None
    name, *more = call.args
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return None
    if not name.value.startswith("."):
        return Import(name.value) if not more else None
    package = more[0] if more else None
    if isinstance(package, ast.Name) and package.id == "__package__":
        rest = name.value.lstrip(".")
        return Import(rest, level=len(name.value) - len(rest))
    if isinstance(package, ast.Constant) and isinstance(package.value, str):
        return Import(importlib.util.resolve_name(name.value, package.value))
    return None


def _assigned(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    """What is assigned to `name` at module level."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        else:
            continue
        if node.value is not None and any(isinstance(t, ast.Name) and t.id == name for t in targets):
            yield node.value


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
