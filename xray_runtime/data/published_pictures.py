"""Pictures of published datasets, for pages: each is read from a checkpoint that has it, and checked."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from markupsafe import Markup, escape

from xray_runtime.data.picture_reader import read_picture
from xray_runtime.data.pictures import DIGITS, FOLDER, SHOWN, shown_picture
from xray_runtime.kernel.store.checkpoints import read_manifest
from xray_runtime.kernel.store.published import read_published

SIDE = 192
"""Largest side of a thumbnail, in pixels."""


def as_html(text: str, address: Callable[[str], str | None]) -> Markup:
    """A text for a page, escaped, with the pictures in it for which `address` has one."""
    html, *parts = SHOWN.split(text)
    found = escape(html)
    for digest, after in zip(parts[::2], parts[1::2], strict=True):
        source = address(digest)
        image = Markup('<img class="picture" height="96" alt="picture {}" title="{}" src="{}">')
        found += escape(shown_picture(digest)) if source is None else image.format(digest, digest, source)
        found += escape(after)
    return found


class PublishedPictures:
    """The pictures of checkpoints (directory, sha256), by the digits of their digests."""

    def __init__(self, checkpoints: Iterable[tuple[Path, str]]) -> None:
        self._files: dict[str, tuple[Path, str, str]] = {}
        for directory, sha256 in checkpoints:
            if not (directory / FOLDER).is_dir():
                continue
            for entry in read_manifest(directory)[0].files:
                if entry.path.startswith(f"{FOLDER}/"):
                    digits = PurePosixPath(entry.path).stem[:DIGITS]
                    self._files[digits] = directory, sha256, entry.path

    def read(self, digest: str) -> tuple[bytes, str] | None:
        """(bytes, ending of the name) of a picture; None: no checkpoint has it. Raises ValueError or OSError: it was
        changed."""
        file = self._files.get(digest)
        return None if file is None else (read_published(*file), PurePosixPath(file[2]).suffix)

    def thumbnail(self, digest: str) -> str | None:
        """A small copy as a data URL."""
        found = self.read(digest)
        if found is None:
            return None
        small = io.BytesIO()
        image, _ = read_picture(io.BytesIO(found[0]))
        image.thumbnail((SIDE, SIDE))
        image.save(small, "PNG")
        return f"data:image/png;base64,{base64.b64encode(small.getvalue()).decode()}"
