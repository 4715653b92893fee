"""Which code computes a result: digests of the modules reached by import, and versions of the libraries they use.

A stage's result depends on its code, not on the file that prints a report: so a key digests what the modules of its
kind reach by import, as syntax trees without comments and docstrings. Modules are found by name and path and read;
none is imported, so this takes no library's import time and runs no one's code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from xray_runtime.store.function_digest import FunctionCode, digest_function
from xray_runtime.store.identity import code_digest
from xray_runtime.store.libraries import is_unpackaged, library_versions, top_of
from xray_runtime.store.module_graph import PUBLIC, reach
from xray_runtime.store.syntax import CodeDigestError

__all__ = [
    "CodeDigestError",
    "callable_digests",
    "callable_libraries",
    "code_digest",
    "library_versions_of",
    "module_digests",
]

Function = str | Callable[..., Any]
"""`module:function`, or the function itself."""


def module_digests(roots: Iterable[str], packages: Iterable[str], leave_out: Collection[str] = ()) -> dict[str, str]:
    """Module → digest of its code, of all that the modules `roots` reach by import within `packages`.

    Args:
        packages: top-level names whose modules are followed; of a dotted name, its first part.
        leave_out: modules that do not count, nor what only they reach.

    Raises:
        CodeDigestError: a root does not exist, a file cannot be read, or a module imports by a name only known at run
            time and does not declare in USES what it may be.
    """
    followed = {top_of(package) for package in packages}
    return dict(sorted(reach(roots, followed.__contains__, leave_out).digests.items()))


def library_versions_of(
    roots: Iterable[str], packages: Iterable[str], leave_out: Collection[str] = ()
) -> dict[str, str]:
    """Distribution → version of the libraries that the same modules import.

    Modules that neither `packages` nor a distribution holds (a file beside the program) are followed, and stand with
    the digest of their code.

    Raises:
        CodeDigestError: as in `module_digests`.
    """
    followed = {top_of(package) for package in packages}
    unpackaged: set[str] = set()

    def follow(name: str) -> bool:
        if name not in followed and name not in unpackaged and is_unpackaged(name):
            unpackaged.add(name)
        return name in followed or name in unpackaged

    found = reach(roots, follow, leave_out)
    sources = {n: code_digest({m: d for m, d in found.digests.items() if top_of(m) == n}) for n in unpackaged}
    return dict(sorted((library_versions(found.libraries) | sources).items()))


def callable_digests(function: Function, packages: Iterable[str], leave_out: Collection[str] = ()) -> dict[str, str]:
    """Module → digest of the code of a reward or gold function.

    Of `module:function` and of a function that a module holds: that module and what it reaches within its own
    top-level package and within `packages`. Of a function of a notebook, a script or a closure: under `module:name`
    one digest of its source and of the constants and functions it uses, and the modules it reaches within `packages`.

    Raises:
        CodeDigestError: as in `module_digests`; or the function's source or one of its values has no digest.
    """
    code, followed = _code_of(function, packages)
    roots = [module for module in sorted(code.modules) if top_of(module) in followed or module in PUBLIC]
    return code.digests | module_digests(roots, followed, leave_out)


def callable_libraries(function: Function, packages: Iterable[str], leave_out: Collection[str] = ()) -> dict[str, str]:
    """Distribution → version of the libraries that a reward or gold function uses, as `library_versions_of`.

    Raises:
        CodeDigestError: as in `callable_digests`.
    """
    code, followed = _code_of(function, packages)
    # Roots that are not followed are libraries themselves.
    roots = [module for module in sorted(code.modules) if top_of(module) not in sys.stdlib_module_names]
    return library_versions_of(roots, followed, leave_out)


def _code_of(function: Function, packages: Iterable[str]) -> tuple[FunctionCode, set[str]]:
    """(what it computes by, top-level names to follow)."""
    followed = {top_of(package) for package in packages}
    if isinstance(function, str):
        module, _, attribute = function.partition(":")
        if not module or not attribute:
            raise CodeDigestError(f"{function!r} is not allowed; it must be 'module:function'")
        return FunctionCode({}, {module}), followed | {top_of(module)}
    code = digest_function(function)
    home = getattr(function, "__module__", None)
    own = {top_of(home)} if home in code.modules else set()
    return code, followed | (own - sys.stdlib_module_names)
