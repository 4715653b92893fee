"""Which modules a module reaches by import, found by name and path: nothing is imported to find out."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from xray_runtime.store.libraries import top_of, version_of
from xray_runtime.store.syntax import DECLARATION, CodeDigestError, Import, Syntax, read_syntax

PUBLIC = ("xray.data", "xray.environments", "xray.rewards")
"""Modules that pass names on and compute nothing: what they import is followed, though `xray` above them is not."""
EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


@dataclass(frozen=True)
class Place:
    """Where a module lies."""

    file: Path | None
    """Its source or its compiled library; None for a directory without `__init__.py`."""
    folders: tuple[str, ...] | None
    """Where its submodules lie; None unless it is a package."""


@dataclass
class Reach:
    """What some modules reach by import."""

    digests: dict[str, str] = field(default_factory=dict)
    """Module → digest of its code, of modules that were followed."""
    libraries: set[str] = field(default_factory=set)
    """Top-level names of the others, the standard library left out."""


class Finder:
    """Finds modules as Python's own import does, and lists each directory once."""

    def __init__(self) -> None:
        self._found: dict[str, Place | None] = {}
        self._listed: dict[str, frozenset[str]] = {}

    def find(self, name: str) -> Place | None:
        """Where module `name` lies; None if it is nowhere, or within the interpreter."""
        if name not in self._found:
            parent, _, last = name.rpartition(".")
            if not parent:
                self._found[name] = _top_level(name)
            else:
                above = self.find(parent)
                self._found[name] = self._below((above and above.folders) or (), last)
        return self._found[name]

    def _below(self, folders: tuple[str, ...], name: str) -> Place | None:
        # Python's order: a package, a compiled library, a source file; a directory of no package comes last.
        for folder in folders:
            here = self._entries(folder)
            if name in here and "__init__.py" in self._entries(f"{folder}/{name}"):
                return Place(Path(folder, name, "__init__.py"), (f"{folder}/{name}",))
            for suffix in (*EXTENSIONS, ".py"):
                if f"{name}{suffix}" in here:
                    return Place(Path(folder, f"{name}{suffix}"), None)
        bare = tuple(f"{folder}/{name}" for folder in folders if Path(folder, name).is_dir())
        return Place(None, bare) if bare else None

    def _entries(self, folder: str) -> frozenset[str]:
        if folder not in self._listed:
            path = Path(folder)
            self._listed[folder] = frozenset(p.name for p in path.iterdir()) if path.is_dir() else frozenset()
        return self._listed[folder]


def _top_level(name: str) -> Place | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: `__main__` and the like have no spec
        return None
    if spec is None:
        return None
    folders = None if spec.submodule_search_locations is None else tuple(spec.submodule_search_locations)
    if not spec.has_location or spec.origin is None:
        return Place(None, folders) if folders else None
    return Place(Path(spec.origin), folders)


def reach(roots: Iterable[str], follow: Callable[[str], bool], leave_out: Collection[str] = ()) -> Reach:
    """Everything `roots` reach by import, breadth first, through modules whose top-level name `follow` accepts.

    Modules in `leave_out`, packages with all below them, and what only they reach, do not count.

    Raises:
        CodeDigestError: a root or a declared module does not exist, a file cannot be read, or a module imports by a
            name only known at run time and declares no USES.
    """
    finder, found, waiting = Finder(), Reach(), deque(roots)
    for root in waiting:
        if follow(top_of(root)) and not finder.find(root):
            raise CodeDigestError(f"{root}: there is no such module, or no source of it")
    seen, left_out = set(leave_out), tuple(f"{name}." for name in leave_out)
    while waiting:
        whole = waiting.popleft()
        if whole in PUBLIC:
            place = None if whole in seen else finder.find(whole)
            seen.add(whole)
            if place is not None and place.file is not None:
                waiting.extend(_imported(whole, place, read_syntax(place.file), finder))
            continue
        if not follow(top_of(whole)):
            if top_of(whole) not in sys.stdlib_module_names:
                found.libraries.add(top_of(whole))
            continue
        # The `__init__` of every package above runs first.
        parts = whole.split(".")
        for name in (".".join(parts[: i + 1]) for i in range(len(parts))):
            place = None if name in seen or name.startswith(left_out) else finder.find(name)
            seen.add(name)
            if place is None or place.file is None:
                continue
            if place.file.name.endswith(EXTENSIONS):
                found.digests[name] = _compiled(name, place.file)
                continue
            syntax = read_syntax(place.file)
            found.digests[name] = syntax.digest
            waiting.extend(_imported(name, place, syntax, finder))
    return found


def _compiled(name: str, file: Path) -> str:
    # Not the bytes, where a version is known: they differ from machine to machine.
    version = version_of(top_of(name))
    return hashlib.sha256(version.encode() if version else file.read_bytes()).hexdigest()


def _imported(module: str, place: Place, syntax: Syntax, finder: Finder) -> Iterator[str]:
    """Full names of all that `module` imports or declares."""
    if syntax.unreadable_line is not None and syntax.uses is None:
        raise CodeDigestError(
            f"{module}, line {syntax.unreadable_line}: imports a module by a name only known at run time; declare what "
            f'it may be at module level: {DECLARATION} = ("package.module",)'
        )
    for name in syntax.uses or ():
        if finder.find(name) is None and top_of(name) not in sys.stdlib_module_names:
            raise CodeDigestError(f"{module}: {DECLARATION} names {name!r}, which does not exist")
        yield name
    for statement in syntax.imports:
        yield from targets(statement, module, place.folders is not None, finder)


def targets(statement: Import, module: str, is_package: bool, finder: Finder) -> Iterator[str]:
    """Full names an import in `module` may stand for; of `from p import n`, p and p.n, which may be no module.

    Raises:
        CodeDigestError: a relative import leaves its top-level package.
    """
    target = statement.module
    if statement.level:
        above = module.split(".")
        above = above[: max(0, len(above) - statement.level + is_package)]
        if not above:
            raise CodeDigestError(f"{module}: a relative import leaves the package")
        target = ".".join([*above, target] if target else above)
    yield target
    names = statement.names
    if "*" in names and (package := finder.find(target)) and package.folders and package.file:
        names = read_syntax(package.file).exports if package.file.suffix == ".py" else ()
    yield from (f"{target}.{name}" for name in names if name != "*")
