"""Pictures of records: their bytes, kept once under their sha256.

A record has pictures in a column `images` (a list) or `image`, and a placeholder in a user's text for each; or in its
messages, as content parts of OpenAI's and Hugging Face's types. A picture is a path in `data.pictures`, bytes as
`datasets` has them, or a data URL. Nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import io
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import pairs_of
from xray_runtime.data.picture_reader import read_picture
from xray_runtime.data.pictures import ENDINGS, pictures_of
from xray_runtime.data.reading.json_values import type_of
from xray_runtime.kernel.errors import shown

PICTURE_PARTS = ("image", "image_url", "input_image")
"""Types of content parts that are pictures."""
COLUMNS = ("image", "images")
MESSAGES = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Columns that may be lists of messages."""
KEYS = ("image", "image_url", "url", "path", "bytes")
"""Where a picture stands in a part or an object, the bytes last: `datasets` gives a path beside them."""


@dataclass(frozen=True)
class StoredPicture:
    """A picture in the folder. Records from files never hold this type."""

    sha256: str
    width: int
    height: int

    @property
    def entry(self) -> dict[str, Any]:
        """As a message's `pictures` have it."""
        return asdict(self)


@dataclass(frozen=True)
class FromColumn:
    """A content part whose picture is in the record's column. Ids of conversations digest its `repr`."""


FROM_COLUMN = FromColumn()


class PictureFolder:
    """Takes the pictures of records into a folder.

    Args:
        folder: made when there is a first picture.
        source: the folder of paths (`data.pictures`); None: paths are refused.
    """

    def __init__(self, folder: Path, source: str | None) -> None:
        self._folder, self._source = folder, None if source is None else Path(source).resolve()

    def store(self, where: object, record: dict[str, Any]) -> dict[str, Any]:
        """Store the pictures of a record; returns the record with a `StoredPicture` for each.

        Raises ValueError: one is missing or unreadable; one line that begins with `where`.
        """
        # Tables have null where a row has no picture.
        given = {name: record[name] for name in COLUMNS if record.get(name) not in (None, "")}
        if len(given) > 1:
            raise ValueError(f"{where}: it has the columns image and images; allowed: one of the two")
        result = {name: value for name, value in record.items() if name not in COLUMNS}
        for name, value in given.items():
            listed = value if isinstance(value, list) else [value]
            result["images"] = [self._take(f"{where}: {name} {n}", one) for n, one in enumerate(listed, start=1)]
        for name in MESSAGES:
            if isinstance(result.get(name), list):
                messages = enumerate(result[name], start=1)
                has_column = "images" in result
                result[name] = [self._message(f"{where}: message {n} of {name}", m, has_column) for n, m in messages]
        return result

    def _message(self, where: str, message: Any, has_column: bool) -> Any:
        parts = message.get("content") if isinstance(message, dict) else None
        if not isinstance(parts, list):
            return message
        content = [self._part(where, part, has_column) for part in parts]
        return message | {"content": content}

    def _part(self, where: str, part: Any, has_column: bool) -> Any:
        if not isinstance(part, dict) or part.get("type") not in PICTURE_PARTS:
            return part
        if has_column and all(part.get(key) is None for key in KEYS):
            return FROM_COLUMN
        return self._take(where, part)

    def _take(self, where: str, source: Any) -> StoredPicture:
        content = self._bytes(where, source)
        try:
            image, form = read_picture(io.BytesIO(content))
        except Exception as error:  # pillow's readers have exceptions of their own
            reason = " ".join(str(error).split()).partition(" <")[0]
            allowed = ", ".join(ENDINGS)
            raise ValueError(f"{where}: the picture cannot be read ({reason}); allowed: {allowed}") from error
        digest = sha256(content).hexdigest()
        file = self._folder / f"{digest}{ENDINGS[form]}"
        if not file.is_file():
            self._folder.mkdir(exist_ok=True)
            file.write_bytes(content)
        return StoredPicture(digest, *image.size)

    def _bytes(self, where: str, source: Any) -> bytes:
        while isinstance(source, Mapping):
            keys = [key for key in reversed(KEYS) if source.get(key) is not None]
            if not keys:
                raise ValueError(f"{where}: the picture is missing; its keys are {', '.join(source) or '(none)'}")
            source = source[keys[0]]
        if isinstance(source, bytes):
            return source
        if not isinstance(source, str):
            raise ValueError(f"{where}: the picture is {type_of(source)}; allowed: a path, bytes, a data URL")
        if source.startswith("data:"):
            return data_url_bytes(where, source)
        if "://" in source:
            raise ValueError(
                f"{where}: the picture is an address ({shown(source)}); allowed: a path, bytes, a data URL"
            )
        if self._source is None:
            raise ValueError(f"{where}: the picture is a path ({shown(source)}): set data.pictures to its folder")
        path = self._source / source
        try:
            path = path.resolve()
            is_file = path.is_file()
        except (OSError, ValueError):  # no path at all, such as Base64 alone
            is_file = False
        if not path.is_relative_to(self._source):
            raise ValueError(f"{where}: the picture {shown(source)} is not in data.pictures")
        if not is_file:
            raise ValueError(f"{where}: the picture {shown(source)} does not exist in data.pictures")
        return path.read_bytes()


def data_url_bytes(where: object, url: str) -> bytes:
    """The content of a data URL. Raises ValueError: one line that begins with `where`."""
    head, _, text = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{where}: the picture's data URL cannot be read ({error})") from None


def keep_pictures_of(folder: Path, sides: Iterable[Path], sources: Iterable[Path] = ()) -> int:
    """Have `folder` hold the pictures of all rows of these files of pairs, and no others; returns their number.

    Args:
        sources: folders that have those which `folder` lacks; each may be missing.
    """
    held = {file.stem: file for source in sources if source.is_dir() for file in source.iterdir()}
    if not held and not folder.is_dir():
        return 0
    prompts = (pair.prompt for side in sides if side.is_file() for pair in pairs_of(side))
    used = {picture["sha256"] for prompt in prompts for picture in pictures_of(prompt)}
    folder.mkdir(exist_ok=True)
    present = {file.stem: file for file in folder.iterdir()}
    for digest in held.keys() & used - present.keys():
        shutil.copyfile(held[digest], folder / held[digest].name)
    for digest in present.keys() - used:
        present[digest].unlink()
    if not used:
        folder.rmdir()
    return len(used)
