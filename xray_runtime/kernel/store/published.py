"""Reads files of checkpoints whose digest is known: what is returned is what was checked."""

from __future__ import annotations

import hashlib
from pathlib import Path

from xray_runtime.kernel.store.checkpoints import read_bounded, read_manifest


def read_published(directory: Path, sha256: str, name: str) -> bytes:
    """The bytes of a file of the checkpoint with the digest `sha256`.

    Raises ValueError where they, or the manifest, are not those that were published; OSError.
    """
    manifest, actual = read_manifest(directory)
    expected = next((entry for entry in manifest.files if entry.path == name and actual == sha256), None)
    if expected is None:
        raise ValueError(f"{directory}: checkpoint {sha256[:12]} has no such file as {name}")
    content = read_bounded(directory / name, expected.size)
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise ValueError(f"{directory / name}: it was changed")
    return content
