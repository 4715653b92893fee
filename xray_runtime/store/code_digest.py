"""Which code computes a result: digests of the modules reached by import, and versions of the libraries they use.

A stage's key digests the modules of its kind and what they reach by import, as syntax trees without comments and
docstrings. So an edit of a report recomputes nothing. Modules are found by name and path and only read: this takes no
library's import time and runs no code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from xray_runtime.store.function_digest import digest_function
from xray_runtime.store.identity import code_digest as code_digest
from xray_runtime.store.libraries import is_unpackaged, library_versions, top_of
from xray_runtime.store.module_graph import PUBLIC, reach
from xray_runtime.store.syntax import CodeDigestError as CodeDigestError

Function = str | Callable[..., Any]
"""`module:function`, or the function itself."""


def module_digests(roots: Iterable[str], packages: Iterable[str], leave_out: Collection[str] = ()) -> dict[str, str]:
    """Module → digest of its code, for all that the modules `roots` reach by import within `packages`.

    Args:
        packages: top-level names whose modules are followed; the first part of a dotted name counts.
        leave_out: as in `module_graph.reach`.

    Raises:
        CodeDigestError: as `module_graph.reach`.
    """
    return reach(roots, {top_of(package) for package in packages}.__contains__, leave_out)[0]


def library_versions_of(
    roots: Iterable[str], packages: Iterable[str], leave_out: Collection[str] = ()
) -> dict[str, str]:
    """Distribution → version of the libraries that the same modules import.

    A module outside `packages` that no distribution holds (a file beside the program) is followed, and has the digest
    of its code in place of a version.

    Raises:
        CodeDigestError: as `module_graph.reach`.
    """
    followed, unpackaged = {top_of(package) for package in packages}, set[str]()

    def follow(name: str) -> bool:
        if name not in followed and name not in unpackaged and is_unpackaged(name):
            unpackaged.add(name)
        return name in followed or name in unpackaged

    digests, libraries = reach(roots, follow, leave_out)
    sources = {n: code_digest({m: d for m, d in digests.items() if top_of(m) == n}) for n in unpackaged}
    return dict(sorted((library_versions(libraries) | sources).items()))


def callable_digests(function: Function, packages: Iterable[str], leave_out: Collection[str] = ()) -> dict[str, str]:
    """Module → digest of the code of a reward or gold function.

    A function in a module stands for that module and what it reaches within its own top-level package and `packages`.
    A function of a notebook, a script or a closure has one digest of its source and of the constants and functions it
    uses, under `module:name`, beside the modules it reaches within `packages`.

    Raises:
        CodeDigestError: as `module_graph.reach`; or the function's source or one of its values has no digest.
    """
    digests, modules, followed = _code_of(function, packages)
    roots = [module for module in modules if top_of(module) in followed or module in PUBLIC]
    return digests | module_digests(roots, followed, leave_out)


def callable_libraries(function: Function, packages: Iterable[str], leave_out: Collection[str] = ()) -> dict[str, str]:
    """Distribution → version of the libraries that a function uses. Raises CodeDigestError as `callable_digests`."""
    _, modules, followed = _code_of(function, packages)
    # Roots that are not followed are libraries themselves.
    roots = [module for module in modules if top_of(module) not in sys.stdlib_module_names]
    return library_versions_of(roots, followed, leave_out)


def _code_of(function: Function, packages: Iterable[str]) -> tuple[dict[str, str], list[str], set[str]]:
    """(digests of its own source, modules it reaches, top-level names to follow)."""
    followed = {top_of(package) for package in packages}
    if isinstance(function, str):
        module, _, attribute = function.partition(":")
        if not module or not attribute:
            raise CodeDigestError(f"{function!r} is not allowed; it must be 'module:function'")
        return {}, [module], followed | {top_of(module)}
    digests, modules = digest_function(function)
    home = getattr(function, "__module__", None)
    own = {top_of(home)} if home in modules else set()
    return digests, sorted(modules), followed | (own - sys.stdlib_module_names)
