"""Imports of transformers without libraries that it would import for nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

SKLEARN = "sklearn"


def import_transformers() -> None:
    """The first import of transformers in a process, without scikit-learn: a fifth of its time.

    It imports the module that imports scikit-learn, for assisted generation alone. Later imports of scikit-learn, in a
    user's reward for example, are not affected.
    """
    if SKLEARN in sys.modules:
        return
    with without(SKLEARN):
        import transformers.generation.candidate_generator  # noqa: F401


@contextlib.contextmanager
def without(library: str) -> Iterator[None]:
    """While the context lasts, a library that this process has not imported cannot be imported."""
    if library in sys.modules:
        yield
        return
    # Importing a module that is None here fails as if it were not installed.
    sys.modules[library] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[library]
