"""Plugs by name: trainers, generators, model families.

A plug is one module or one folder of the package that holds its sort, or an entry point of somebody else's package. It
exposes one object under the name its sort agrees on. Names are known without importing any plug; a plug is imported
when it is asked for.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

USES: tuple[str, ...] = ()
"""The key of a stage digests the modules of the plugs that its config chooses, through `Registry.module`."""


GROUPS = b"[xray."
"""How the headers of X-ray's groups of entry points begin."""


REGISTRIES: dict[str, Registry[Any]] = {}
"""Group of entry points → its registry."""


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The plugs of one sort."""

    sort: str
    """Their name in messages, such as `trainer`."""
    package: str
    """Each of its modules and folders is a plug of the same name, unless that begins with `_`."""
    attribute: str
    """The object that the module of every plug exposes."""
    group: str
    """Entry points: `name = "package.module"`, or `"package.module:OBJECT"`."""

    def __post_init__(self) -> None:
        REGISTRIES.setdefault(self.group, self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def get(self, name: str) -> T:
        """The plug `name`; its module is imported the first time. Raises ValueError: there is none."""
        module_name, attribute = self._place(name)
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute):
            raise ValueError(f"{self.sort} {name!r}: {module_name} exposes no {attribute}")
        return cast("T", getattr(module, attribute))

    def module(self, name: str) -> str:
        """The module of the plug `name`, without importing it. Raises ValueError: there is none."""
        return self._place(name)[0]

    def _place(self, name: str) -> tuple[str, str]:
        if name not in self._places:
            known = ", ".join(self._places) or "none"
            raise ValueError(f"{self.sort} = {name!r} is not allowed: known are {known}")
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, tuple[str, str]]:
        """Name → module and object, in the order of the names."""
        folders = importlib.import_module(self.package).__path__
        modules = {
            module.name: (f"{self.package}.{module.name}", self.attribute)
            for module in pkgutil.iter_modules(folders)
            if not module.name.startswith("_")
        }
        for point in _entry_points(self.group):
            module_and_object = (point.module, point.attr or self.attribute)
            if modules.setdefault(point.name, module_and_object) != module_and_object:
                raise ValueError(
                    f"{self.sort} {point.name!r} is defined twice: {modules[point.name][0]}, {point.module}"
                )
        return dict(sorted(modules.items()))


def _entry_points(group: str) -> Iterable[EntryPoint]:
    """The entry points of other packages in a group."""
    if not any(map(_has_plugs, sys.path)):
        return ()
    # Imported late: most installations have no plugs of others, and it takes as long as a command may.
    from importlib.metadata import entry_points

    return entry_points(group=group)


def _has_plugs(place: str) -> bool:
    """Whether a place of the import path may hold a package that declares entry points of X-ray's groups."""
    try:
        state = os.stat(place or ".").st_mtime_ns
    except OSError:
        return False
    return _declares_plugs(place or ".", state)


@lru_cache
def _declares_plugs(place: str, _state: int) -> bool:
    try:
        names = os.listdir(place)
    except OSError:  # an archive
        return True
    for name in names:
        if name.endswith((".dist-info", ".egg-info", "EGG-INFO")):
            try:
                with open(f"{place}/{name}/entry_points.txt", "rb") as file:
                    if GROUPS in file.read():
                        return True
            except OSError:
                continue
    return False


def can(capabilities: object, capability: str, value: object = True) -> bool:
    """Whether a plug has a capability; of one that is several things, whether `value` is among them."""
    has: object = getattr(capabilities, capability)
    return value in has if isinstance(has, tuple) else bool(has)


def unsupported(feature: str, where: str, able: Collection[str] = (), why: str = "") -> str:
    """The line that says that something is not supported.

    Args:
        feature: a field and its value.
        where: what it is not supported with.
        able: names of the plugs that support it.
        why: the reason or the remedy.
    """
    others = f" ({', '.join(able)} can)" if able else ""
    return f"{feature} is not supported with {where}{others}" + (f": {why}" if why else "")


def able(registry: Registry[Any], capability: str, value: object = True) -> list[str]:
    """Names of the plugs that have a capability."""
    return [name for name in registry if can(registry.get(name).capabilities, capability, value)]
