"""A comparison on disk: questions, replies, and each verdict as soon as it is given.

    feedback/DIGEST/session.json        the two models, the source of prompts, sampling; DIGEST is its digest
    feedback/DIGEST/replies.jsonl       one question in each line
    feedback/DIGEST/judgements.jsonl    one verdict in each line; a judge's last verdict on a question counts

The same comparison continues in the same directory. A line that a crash cut off does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.config.validation import ConfigError
from xray_runtime.feedback.judgements import Judgement, Question, left_model, verdict_of
from xray_runtime.files import sync, write_atomic
from xray_runtime.store.identity import digest
from xray_runtime.store.manifest import Sha256

FOLDER = "feedback"
SESSION, REPLIES, JUDGEMENTS = "session.json", "replies.jsonl", "judgements.jsonl"

PromptSource = Literal["heldout", "train", "file", "typed"]
Row = TypeVar("Row", bound=BaseModel)


class Setup(BaseModel):
    """Two comparisons with the same setup are the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    a: Sha256
    b: Sha256
    prompts: PromptSource
    source: Sha256 | None
    """sha256 of the dataset's checkpoint or of the file; None for typed prompts."""
    max_prompt_tokens: int | None
    max_new_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(gt=0)]
    seed: Annotated[int, Field(ge=0)]


class Session:
    """A comparison in `directory`; see `open_session` (to write) and `read_sessions`."""

    def __init__(self, directory: Path, setup: Setup) -> None:
        self.directory, self.setup = directory, setup
        self.questions = read_rows(directory / REPLIES, Question)
        self.judgements = read_rows(directory / JUDGEMENTS, Judgement)

    @property
    def name(self) -> str:
        return self.directory.name

    def add_questions(self, questions: list[Question]) -> None:
        """Keep more questions; they are on disk when this returns."""
        _append(self.directory / REPLIES, questions)
        self.questions += questions

    def add_judgement(self, judgement: Judgement) -> None:
        """Keep a verdict; it is on disk when this returns."""
        _append(self.directory / JUDGEMENTS, [judgement])
        self.judgements.append(judgement)

    def judge(self, number: int, judge: str, key: str, correction: str | None = None) -> None:
        """Keep the verdict of `key` (of `judgements.KEYS`) on a question, as `judge` sees its sides."""
        left, now = left_model(self.setup.seed, judge, number), datetime.now(UTC).isoformat(timespec="seconds")
        verdict = verdict_of(key, left)
        self.add_judgement(
            Judgement(number=number, left=left, verdict=verdict, judge=judge, at=now, correction=correction)
        )

    def open_questions(self, judge: str) -> list[Question]:
        """The questions that `judge` has not answered; equal replies are not asked about."""
        done = {judgement.number for judgement in self.judgements if judgement.judge == judge}
        return [question for question in self.questions if question.number not in done and question.a != question.b]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The session in `directory`. Raises ConfigError where its files are damaged."""
        try:
            return cls(directory, Setup.model_validate_json((directory / SESSION).read_bytes()))
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{directory / SESSION}: cannot be read ({str(error).splitlines()[0]})") from None


def session_directory(output: Path, setup: Setup) -> Path:
    """The directory of the session of `setup`, made if need be."""
    directory = output / FOLDER / digest(setup.model_dump(mode="json"))[:12]
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / SESSION).exists():
        write_atomic(directory / SESSION, json.dumps(setup.model_dump(mode="json"), indent=2) + "\n")
        sync(directory)
        sync(directory.parent)
    return directory


def open_session(directory: Path) -> Session:
    """The session in `directory`, to write to; only one process may at a time."""
    for name in (REPLIES, JUDGEMENTS):
        _cut_torn_line(directory / name)
    return Session.read(directory)


def read_sessions(output: Path) -> list[Session]:
    """Every session in the output directory, by name. Raises ConfigError where the files of one are damaged."""
    return [Session.read(path.parent) for path in sorted((output / FOLDER).glob(f"*/{SESSION}"))]


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The whole lines of a file; a last line that a crash cut off is skipped.

    Raises:
        ConfigError: another line is damaged.
    """
    content = path.read_bytes() if path.exists() else b""
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            rows.append(kind.model_validate_json(line))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{path} line {number}: damaged ({reason}); restore the file from a copy") from None
    return rows


def _append(path: Path, rows: Iterable[BaseModel]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(row.model_dump_json().encode() + b"\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def _cut_torn_line(path: Path) -> None:
    """Remove a last line that a crash cut off, so that the next one starts a line of its own."""
    with path.open("ab") as file:
        whole = path.read_bytes().rfind(b"\n") + 1
        file.truncate(whole)
        os.fsync(file.fileno())
