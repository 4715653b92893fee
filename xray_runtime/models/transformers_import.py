"""The first import of transformers in a process, without scikit-learn: a fifth of its time."""

from __future__ import annotations

import sys

SKLEARN = "sklearn"


def import_transformers() -> None:
    """Import the module of transformers that imports scikit-learn, for assisted generation alone, while that cannot be
    imported. Later imports of scikit-learn, in a user's reward for example, are not affected."""
    if SKLEARN in sys.modules:
        return
    # Importing a module that is None here fails as if it were not installed.
    sys.modules[SKLEARN] = None  # type: ignore[assignment]
    try:
        import transformers.generation.candidate_generator  # noqa: F401
    finally:
        del sys.modules[SKLEARN]
