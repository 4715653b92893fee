"""Which modules a module reaches by import, found by name and path without importing any of them."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from xray_runtime.kernel.store.libraries import top_of, version_of
from xray_runtime.kernel.store.syntax import DECLARATION, CodeDigestError, Import, Syntax, keep_syntax, read_syntax

PUBLIC = ("xray.algorithms", "xray.data", "xray.environments", "xray.rewards")
"""Modules that pass names on and compute nothing: what they import is followed, though `xray` above them is not."""


class Module(NamedTuple):
    """The place of a module."""

    file: Path | None
    """Its source or its compiled library; None for a directory without `__init__.py`."""
    folders: list[str] | None
    """Directories of its submodules; None unless it is a package."""


class Finder:
    """Finds modules as Python's own import does, each once."""

    def __init__(self) -> None:
        self._found: dict[str, Module | None] = {}

    def find(self, name: str) -> Module | None:
        """Module `name`; None where it does not exist or is part of the interpreter."""
        if name not in self._found:
            package, _, last = name.rpartition(".")
            above = self.find(package) if package else None
            try:
                if not package:
                    spec = importlib.util.find_spec(name)
                else:
                    # By its last name: for a dotted name Python would look for an imported parent.
                    folders = (above and above.folders) or []
                    spec = importlib.machinery.PathFinder.find_spec(last, folders)
            except (ImportError, ValueError):  # ValueError: `__main__` and the like have no spec
                spec = None
            self._found[name] = _module(spec) if spec is not None else None
        return self._found[name]


def _module(spec: importlib.machinery.ModuleSpec) -> Module | None:
    folders = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    file = Path(spec.origin) if spec.has_location and spec.origin is not None else None
    return Module(file, folders) if file or folders else None


def reach(
    roots: Iterable[str], follow: Callable[[str], bool], leave_out: Collection[str] = ()
) -> tuple[dict[str, str], set[str]]:
    """(module → digest of its code, libraries): all that `roots` reach by import, breadth first.

    Args:
        follow: whether modules below a top-level name are followed. The others are libraries, unless Python has them.
        leave_out: modules, and packages with all below them, that do not count; nor does what only they reach.

    Raises:
        CodeDigestError: a root or a declared module does not exist, a file cannot be read, or a module imports by a
            name made at run time and declares no USES.
    """
    finder, waiting = Finder(), deque(roots)
    digests, libraries = dict[str, str](), set[str]()
    for root in waiting:
        if follow(top_of(root)) and not finder.find(root):
            raise CodeDigestError(f"{root}: there is no such module, or no source of it")
    seen, left_out = set(leave_out), tuple(f"{name}." for name in leave_out)
    handled = set[str]()
    while waiting:
        whole = waiting.popleft()
        if whole in handled:
            continue
        handled.add(whole)
        if whole not in PUBLIC and not follow(top_of(whole)):
            libraries |= {top_of(whole)} - sys.stdlib_module_names
            continue
        # The `__init__` of every package above runs first.
        parts = whole.split(".")
        for name in [whole] if whole in PUBLIC else [".".join(parts[: i + 1]) for i in range(len(parts))]:
            module = None if name in seen or name.startswith(left_out) else finder.find(name)
            seen.add(name)
            if module is None or module.file is None:
                continue
            if module.file.suffix != ".py":
                # The bytes of a compiled library differ from machine to machine; its version does not.
                version = version_of(top_of(name))
                content = version.encode() if version else module.file.read_bytes()
                digests[name] = hashlib.sha256(content).hexdigest()
                continue
            syntax = read_syntax(module.file)
            if whole not in PUBLIC:
                digests[name] = syntax.digest
            waiting.extend(_imported(name, module, syntax, finder))
    keep_syntax()
    return dict(sorted(digests.items())), libraries


def _imported(name: str, module: Module, syntax: Syntax, finder: Finder) -> Iterator[str]:
    """Full names of all that a module imports or declares."""
    if syntax.unreadable_line is not None and syntax.uses is None:
        raise CodeDigestError(
            f"{name}, line {syntax.unreadable_line}: imports a module by a name made at run time; declare what "
            f'it may be at module level: {DECLARATION} = ("package.module",)'
        )
    for used in syntax.uses or ():
        if finder.find(used) is None and top_of(used) not in sys.stdlib_module_names:
            raise CodeDigestError(f"{name}: {DECLARATION} names {used!r}, which does not exist")
        yield used
    for statement in syntax.imports:
        package = name if module.folders is not None else name.rpartition(".")[0]
        try:
            yield from targets(statement, package, finder)
        except ImportError:
            raise CodeDigestError(f"{name}: a relative import leaves the package") from None


def targets(statement: Import, package: str, finder: Finder) -> Iterator[str]:
    """Full names an import may stand for: for `from p import n`, p and p.n, which may not be a module. Raises
    ImportError: a relative import leaves the top-level package."""
    target = importlib.util.resolve_name(statement.module, package)
    yield target
    names = statement.names
    if "*" in names and (found := finder.find(target)) and found.folders and found.file:
        names = read_syntax(found.file).exports if found.file.suffix == ".py" else ()
    yield from (f"{target}.{name}" for name in names if name != "*")
