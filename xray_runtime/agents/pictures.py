"""Pictures in an agent's requests: those of the stage's datasets, which a task has as data URLs and a call sends again.

A picture is known by its bytes. One that no dataset of the stage has is refused, since trainers and generators read
pictures from there, and so does a replay.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from xray_runtime.data.picture_reader import read_picture
from xray_runtime.data.pictures import PLACEHOLDER, PictureFiles
from xray_runtime.data.reading.json_values import type_of
from xray_runtime.data.reading.pictures import KEYS, StoredPicture, data_url_bytes
from xray_runtime.kernel.errors import shown

TYPES = {".png": "png", ".jpg": "jpeg", ".webp": "webp", ".gif": "gif", ".bmp": "bmp"}
"""Ending of a picture's file → its media type, after `image/`."""


class RequestPictures:
    """The pictures in `folders`, of a stage's datasets."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._files = PictureFiles(folders)
        self._known: dict[str, StoredPicture] = {}

    def read(self, where: str, part: Mapping[str, Any]) -> StoredPicture:
        """The picture of a content part. Raises ValueError: one line that begins with `where`."""
        source: Any = part
        while isinstance(source, Mapping):
            source = next((source[key] for key in KEYS if source.get(key) is not None), None)
        if not isinstance(source, str) or not source.startswith("data:"):
            found = shown(source) if isinstance(source, str) else type_of(source)
            raise ValueError(f"{where}: the picture is {found}; allowed: a data URL")
        digest = sha256(data_url_bytes(where, source)).hexdigest()
        if digest not in self._known:
            try:
                image, _ = read_picture(self._files.path(digest))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            self._known[digest] = StoredPicture(digest, *image.size)
        return self._known[digest]

    def in_task(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message of a row as Chat Completions write it: one with pictures in parts."""
        if not message.get("pictures"):
            return message
        others = {name: value for name, value in message.items() if name != "pictures"}
        return others | {"content": list(self._parts(message))}

    def _parts(self, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        pictures = iter(message["pictures"])
        for number, text in enumerate(message["content"].split(PLACEHOLDER)):
            if number:
                file = self._files.path(next(pictures)["sha256"])
                encoded = base64.b64encode(file.read_bytes()).decode()
                yield {
                    "type": "image_url",
                    "image_url": {"url": f"data:image/{TYPES[file.suffix]};base64,{encoded}"},
                }
            if text:
                yield {"type": "text", "text": text}
