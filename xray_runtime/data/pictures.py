"""Pictures in rows.

In token ids a picture stands as negative numbers, one for each token that the model makes of it: its first four are
31 bits each of the picture's sha256, and the rest repeats them. So ids alone say what a row holds. Lengths, batches,
caches, ledgers and the comparison of prompts need no further column, and none of them can lose a picture or take two
prompts with different pictures for one. No loss or reply has such numbers: pictures are in prompts.

In messages a picture is `PLACEHOLDER` in the text, and an entry of the message's `pictures`: sha256, width, height. The
file itself lies in the dataset's folder `FOLDER`, under its sha256.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = "pictures"
"""Folder of a dataset with its pictures."""
PLACEHOLDER = "<image>"
"""The text in a message where a picture stands."""
PARTS, BITS = 4, 31
DIGITS = PARTS * BITS // 4
"""Hexadecimal digits of the sha256 that ids hold: 124 bits."""
SHOWN = re.compile(f"<image ([0-9a-f]{{{DIGITS}}})>")
"""A picture in a text that is shown."""
ENDINGS = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "GIF": ".gif", "BMP": ".bmp"}
"""pillow's formats that are read → the ending of their files."""


def picture_ids(digest: str, count: int) -> list[int]:
    """The ids of a picture of `count` tokens. Raises ValueError: so few cannot tell pictures apart."""
    if count < PARTS:
        raise ValueError(f"a picture of {count} tokens is not supported: must be at least {PARTS}; enlarge it")
    number = int(digest[:DIGITS], 16)
    parts = [-1 - (number >> (BITS * part) & (2**BITS - 1)) for part in reversed(range(PARTS))]
    return [parts[n % PARTS] for n in range(count)]


def digest_of(ids: Sequence[int]) -> str:
    """The first `DIGITS` digits of the sha256 of the picture that `ids` begin with."""
    number = 0
    for part in ids[:PARTS]:
        number = number << BITS | (-1 - int(part))
    return f"{number:0{DIGITS}x}"


def pictures_in(ids: Sequence[int], count: Callable[[str], int]) -> Iterator[str]:
    """`digest_of` each picture in a row; `count` says how many tokens one has. Raises ValueError: a picture is cut."""
    start = 0
    while start < len(ids):
        if ids[start] >= 0:
            start += 1
            continue
        digest = digest_of(ids[start : start + PARTS])
        end = start + count(digest)
        if list(ids[start:end]) != picture_ids(digest, end - start):
            raise ValueError(f"the picture {digest} is cut in a row of tokens")
        yield digest
        start = end


def runs(ids: Iterable[int]) -> Iterator[tuple[str | None, list[int]]]:
    """(digits of a picture or None, ids) of a row's pictures, and of the tokens between them."""
    for is_picture, run in groupby(map(int, ids), key=lambda number: number < 0):
        numbers = list(run)
        yield (digest_of(numbers) if is_picture else None), numbers


def shown_picture(digest: str) -> str:
    """A picture in a text that is shown (`SHOWN`)."""
    return f"<image {digest[:DIGITS]}>"


def shown_text(message: Mapping[str, Any]) -> str:
    """A message's text, in which pictures are told apart."""
    first, *rest = str(message["content"]).split(PLACEHOLDER) if message.get("pictures") else [str(message["content"])]
    return first + "".join(
        shown_picture(picture["sha256"]) + text for picture, text in zip(message.get("pictures", ()), rest, strict=True)
    )


@dataclass(frozen=True)
class PictureTokens:
    """How a model's prompts write pictures; an attribute `pictures` of its tokenizer (`of`)."""

    written: tuple[int, ...]
    """Ids with which a prompt's text writes a picture."""
    token: int
    """The one of them in whose place all tokens of the picture come."""
    layout: Callable[[int, int], list[int]]
    """(width, height) of a picture → the ids of its tokens, as transformers has them."""
    around: tuple[int, ...]
    """Ids on both sides of the picture's own, which tell it from a neighbour where `written` has none there."""
    rule: str
    """All that the length of `layout` depends on besides the tokenizer, as text."""

    @staticmethod
    def of(tokenizer: object) -> PictureTokens | None:
        """None: its model reads no pictures."""
        found = getattr(tokenizer, "pictures", None)
        assert found is None or isinstance(found, PictureTokens)
        return found

    def expand(self, ids: Sequence[int], pictures: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        """(ids with each `token` replaced by the ids of the next picture, the place there of each given id, and the
        end). Raises ValueError: `ids`, which may end earlier, have more places than pictures."""
        if ids.count(self.token) > len(pictures):
            raise ValueError("the chat template writes more pictures than the messages have")
        expanded: list[int] = []
        places = []
        remaining = iter(pictures)
        for number in ids:
            places.append(len(expanded))
            if number == self.token:
                one = next(remaining)
                ids_of_one = picture_ids(one["sha256"], len(self.layout(one["width"], one["height"])))
                expanded += [*self.around, *ids_of_one, *self.around]
            else:
                expanded.append(number)
        return expanded, [*places, len(expanded)]


class PictureFiles:
    """The pictures of datasets, by the digits of their digests; each is checked as it is read."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._paths = {file.name[:DIGITS]: file for folder in folders for file in sorted(folder.iterdir())}

    def path(self, digest: str) -> Path:
        """The file of a picture. Raises ValueError: it is not there, or has other bytes."""
        file = self._paths.get(digest[:DIGITS])
        if file is None or file.is_symlink() or not file.is_file():
            raise ValueError(f"the picture {digest} is in no dataset of this stage")
        if sha256(file.read_bytes()).hexdigest() != file.stem:
            raise ValueError(f"{file}: damaged: its bytes are not those that its name says")
        return file


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The pictures of messages, in order."""
    return [picture for message in messages for picture in message.get("pictures", ())]
