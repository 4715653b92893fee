"""The lookup of stage kinds by name: X-ray's own, one folder of `methods` each, and users'.

The files that declare kinds do not import torch; bodies are imported when they run.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.util import find_spec

from xray_runtime.kernel.graph.kind import KINDS, StageKind

METHODS = "xray_runtime.methods"
"""Each of its folders with a module `kind` declares kinds when that is imported."""
USES: tuple[str, ...] = ()
"""None of the modules imported by name here: a key digests the code of a kind's body separately."""


def shipped() -> list[StageKind]:
    """X-ray's own kinds, by name."""
    _import_methods()
    kinds = [kind for kind in KINDS.values() if kind.registered_in.startswith(f"{METHODS}.")]
    return sorted(kinds, key=lambda kind: kind.name)


def find_kind(name: str) -> StageKind | None:
    """A kind by its name: one of X-ray's, or one whose module is imported already.

    Names from manifests and configs are untrusted, so this never imports what they name.
    """
    _import_methods()
    return KINDS.get(name)


def all_kinds() -> list[StageKind]:
    """X-ray's kinds, and those whose modules are imported already."""
    _import_methods()
    return list(KINDS.values())


def import_kind(name: str, module: str) -> StageKind | None:
    """A kind by its name; imports `module`, which registers it.

    Only for names that Ray passes from the process of the graph, which has imported `module` itself. Use `find_kind`
    for names in a manifest, a bundle, a config or a Prefect parameter.
    """
    if find_kind(name) is None:
        importlib.import_module(module)
    return KINDS.get(name)


@cache
def _import_methods() -> None:
    for folder in pkgutil.iter_modules(importlib.import_module(METHODS).__path__):
        module = f"{METHODS}.{folder.name}.kind"
        if folder.ispkg and find_spec(module) is not None:
            importlib.import_module(module)
