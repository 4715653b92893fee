"""The first import of transformers in a process, without scikit-learn: a fifth of its time."""

from __future__ import annotations

from xray_runtime.kernel.hidden_libraries import hidden


def import_transformers() -> None:
    """Import the module of transformers that imports scikit-learn, for assisted generation alone, while that cannot be
    imported. Later imports of scikit-learn, in a user's reward for example, are not affected."""
    with hidden("sklearn"):
        import transformers.generation.candidate_generator  # noqa: F401
