"""A memory of digests, and what is read in spite of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.kernel.store import digest_memory
from xray_runtime.kernel.store.digest_memory import DigestMemory


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DigestMemory:
    """A memory that also remembers what was just written, as a test's files all were."""
    monkeypatch.setattr(digest_memory, "SETTLED_S", -1.0)
    monkeypatch.setattr(digest_memory, "CANNOT_TELL", frozenset())
    return DigestMemory(tmp_path / "memory" / "digests.sqlite")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose bytes were read."""
    names: list[str] = []
    digest = hashlib.file_digest

    def counted(file: Any, algorithm: str) -> Any:
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{file.fileno()}")))
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return names
