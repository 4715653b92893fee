"""Which code computes a result: digests of the modules reached by import, and versions of the libraries they use.

A stage's key digests the modules of its kind and what they reach by import, as syntax trees without comments and
docstrings. So an edit of a report recomputes nothing. Modules are found by name and path and only read: this takes no
library's import time and runs no code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any, NamedTuple

from xray_runtime.kernel.store.function_digest import digest_function
from xray_runtime.kernel.store.identity import code_digest as code_digest
from xray_runtime.kernel.store.libraries import is_unpackaged, library_versions, top_of
from xray_runtime.kernel.store.module_graph import reach
from xray_runtime.kernel.store.syntax import CodeDigestError as CodeDigestError

Function = str | Callable[..., Any]
"""`module:function`, or the function itself."""


class Code(NamedTuple):
    """The code that computes a result."""

    modules: dict[str, str]
    """Module → digest of its code. A function that no module holds has one under `module:name`."""
    libraries: dict[str, str]
    """Distribution → version. A module that no distribution holds (a file beside the program) has the digest of its
    code in place of a version."""


def code_reached(roots: Iterable[str], packages: Iterable[str], leave_out: Collection[str] = ()) -> Code:
    """All that the modules `roots` reach by import.

    Args:
        packages: top-level names whose modules are followed, as files beside the program are; the first part of a
            dotted name counts. The others are libraries.
        leave_out: as in `module_graph.reach`.

    Raises:
        CodeDigestError: as `module_graph.reach`.
    """
    followed, unpackaged = {top_of(package) for package in packages}, set[str]()

    # The same names come from every module.
    @cache
    def follow(name: str) -> bool:
        if name not in followed and name not in unpackaged and is_unpackaged(name):
            unpackaged.add(name)
        return name in followed or name in unpackaged

    digests, libraries = reach(roots, follow, leave_out)
    sources = {n: code_digest({m: d for m, d in digests.items() if top_of(m) == n}) for n in unpackaged}
    modules = {module: digest for module, digest in digests.items() if top_of(module) in followed}
    return Code(modules, dict(sorted((library_versions(libraries) | sources).items())))


def function_code(function: Function, packages: Iterable[str], leave_out: Collection[str] = ()) -> Code:
    """The code of a reward or gold function.

    A function in a module stands for that module and what it reaches within its own top-level package and `packages`. A
    function of a notebook, a script or a closure has one digest of its source and of the constants and functions it
    uses, beside the modules it reaches within `packages`. Raises CodeDigestError: as `module_graph.reach`; or the
    function's source or one of its values has no digest.
    """
    followed, own = {top_of(package) for package in packages}, dict[str, str]()
    if isinstance(function, str):
        module, _, attribute = function.partition(":")
        if not module or not attribute:
            raise CodeDigestError(f"{function!r} is not allowed; it must be 'module:function'")
        reached = {module}
        followed.add(top_of(module))
    else:
        own, reached = digest_function(function)
        home = getattr(function, "__module__", None)
        followed |= ({top_of(home)} if home in reached else set()) - sys.stdlib_module_names
    roots = sorted(module for module in reached if top_of(module) not in sys.stdlib_module_names)
    code = code_reached(roots, followed, leave_out)
    return code._replace(modules=own | code.modules)
