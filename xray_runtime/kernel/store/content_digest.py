"""Digests of what a config names outside: files, directories, names on a hub, data in an installed package.

A key covers bytes and not their place. The digest of a directory covers the relative path and the bytes of every file,
links followed. Names that begin with a dot and `__pycache__` are left out at any depth: readers of models and data sets
do not open them, and version control, downloads and desktops write there (`.git`, `.cache`, `.DS_Store`). Empty
directories, times and permissions do not count either.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from xray_runtime.kernel.store.digest_memory import DigestMemory, FileReader, OutsideChangedError as OutsideChangedError
from xray_runtime.kernel.store.hub import PACKAGED_DATA, Holds, OutsideError as OutsideError, commit, is_hub_name
from xray_runtime.kernel.store.location import PACKAGED_MODELS

Kind = Literal["file", "directory", "hub", "package"]
BESIDE_GGUF = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|tekken|tiktoken).*|.*\.jinja|.*config\.json"
)
"""Files that transformers reads with a .gguf file next to them: a tokenizer.json replaces the tokenizer in it."""


class Outside(BaseModel):
    """Something that a config names, and its digest."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    kind: Kind
    name: str
    """As the config has it."""
    digest: str
    """sha256 of the bytes; the commit of a hub name; `name==version` of a package."""
    field: str
    """The config's field that names it."""
    holds: Holds

    @property
    def identity(self) -> dict[str, str]:
        """The part that a key covers: not the name, so that the same bytes elsewhere are equal."""
        return {"kind": self.kind, "digest": self.digest}


def file_digest(path: Path, memory: DigestMemory) -> str:
    """sha256 of a file's bytes, from memory where the file did not change. Raises as `FileReader.digest`."""
    with FileReader(memory) as reader:
        return reader.digest(path)


def directory_digest(path: Path, memory: DigestMemory) -> str:
    """sha256 over the relative paths and the digests of all files below `path`.

    Raises:
        OutsideChangedError: a file changed while it was read.
        OutsideError: a link leads nowhere or in a circle, or there is something that is neither file nor directory.
        OSError: something cannot be read.
    """
    return _digest_of_all(sorted(_files_below(path, path, ())), memory)


def outside_digest(value: str, memory: DigestMemory, *, field: str, holds: Holds = "dataset") -> Outside:
    """The digest of what `value` names: in a package, else a file, else a directory, else on a hub.

    Args:
        field: where the config names it; errors begin with it.
        holds: a packaged name and a hub distinguish models from data sets.

    Raises:
        OutsideError: there is nothing of this name, or it cannot be read.
        OutsideChangedError: a file changed while it was read.
    """

    def found(kind: Kind, digest: str) -> Outside:
        return Outside(kind=kind, name=value, digest=digest, field=field, holds=holds)

    packaged = PACKAGED_DATA.get(value) if holds == "dataset" else PACKAGED_MODELS.get(value, (None,))[0]
    if packaged:
        distribution = packaged.replace("_", "-")
        try:
            return found("package", f"{distribution}=={importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            raise OutsideError(f"{field}: {value!r} needs the package {distribution}") from None
    path = Path(value)
    try:
        if path.is_file():
            beside = _beside_gguf(path) if path.suffix == ".gguf" else []
            return found("file", _digest_of_all([("", path), *beside], memory) if beside else file_digest(path, memory))
        if path.is_dir():
            return found("directory", directory_digest(path, memory))
    except OSError as error:
        raise OutsideError(f"{field}: {value!r} cannot be read ({error.strerror or error})") from error
    except (OutsideChangedError, OutsideError) as error:
        raise type(error)(f"{field}: {error}") from error
    if not is_hub_name(value):
        raise OutsideError(f"{field}: {value!r} is neither a file nor a directory, nor a name on a hub")
    return found("hub", commit(value, field, holds))


def check_unchanged(outside: Outside, memory: DigestMemory) -> None:
    """Compare again after it was read; unchanged files are not read again.

    Raises:
        OutsideChangedError: it changed meanwhile.
        OutsideError: it is gone.
    """
    now = outside_digest(outside.name, memory, field=outside.field, holds=outside.holds)
    if now.identity != outside.identity:
        raise OutsideChangedError(
            f"{outside.field}: {outside.name!r} changed while it was read ({outside.kind} {outside.digest[:12]} became "
            f"{now.kind} {now.digest[:12]}); run again"
        )


def _digest_of_all(files: list[tuple[str, Path]], memory: DigestMemory) -> str:
    digest = hashlib.sha256()
    with FileReader(memory) as reader:
        for name, path in files:
            digest.update(json.dumps([name, reader.digest(path)]).encode())
    return digest.hexdigest()


def _files_below(top: Path, directory: Path, above: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """(relative path, path) of every file that counts."""
    real = os.path.realpath(directory)
    if real in above:
        raise OutsideError(f"{directory} is a circular link")
    for path in directory.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from _files_below(top, path, (*above, real))
        elif path.is_file():
            yield path.relative_to(top).as_posix(), path
        else:
            raise OutsideError(f"{path} is neither a file nor a directory, or a broken link")


def _beside_gguf(path: Path) -> list[tuple[str, Path]]:
    folder = path.absolute().parent
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and BESIDE_GGUF.fullmatch(p.name))
    templates = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return [(name, folder / name) for name in names] + [(p.relative_to(folder).as_posix(), p) for p in templates]
