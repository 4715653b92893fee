"""A comparison on disk: questions, replies, and each verdict as soon as it is given.

    feedback/DIGEST/session.json        the two models, the source of prompts, sampling; DIGEST is its digest
    feedback/DIGEST/replies.jsonl       one question in each line
    feedback/DIGEST/judgements.jsonl    one verdict in each line; a judge's last verdict on a question counts
    feedback/DIGEST/signed.json         signs these two after each change; see `kernel.history.signed_files`

Forged lines and older copies are refused. The same comparison continues in the same directory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.files import sync, write_atomic
from xray_runtime.kernel.history.comparisons import JUDGEMENTS, REPLIES, SESSION, SESSIONS, comparison_name
from xray_runtime.kernel.history.signed_files import log_signed, read_signed, write_signed
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.manifest import Sha256
from xray_runtime.live.feedback.judgements import Judgement, Question, left_model, verdict_of

PromptSource = Literal["heldout", "train", "file", "typed"]
Row = TypeVar("Row", bound=BaseModel)


class Setup(BaseModel):
    """Two comparisons with the same setup are the same."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

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
    """A comparison in `directory`; only one process may write to it at a time."""

    def __init__(self, directory: Path, setup: Setup) -> None:
        self.directory, self.setup = directory, setup
        self._content = read_signed(self._output, directory, (REPLIES, JUDGEMENTS))
        self.questions = _rows(directory / REPLIES, self._content[REPLIES], Question)
        self.judgements = _rows(directory / JUDGEMENTS, self._content[JUDGEMENTS], Judgement)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def _output(self) -> Path:
        return self.directory.parent.parent

    def _append(self, name: str, rows: Sequence[BaseModel]) -> None:
        content = self._content[name] + b"".join(row.model_dump_json().encode() + b"\n" for row in rows)
        write_signed(self._output, self.directory, {name: content})
        self._content[name] = content

    def add_questions(self, questions: list[Question]) -> None:
        """Keep more questions; they are on disk when this returns."""
        self._append(REPLIES, questions)
        self.questions += questions

    def add_judgement(self, judgement: Judgement) -> None:
        """Keep a verdict; it is on disk when this returns."""
        self._append(JUDGEMENTS, [judgement])
        self.judgements.append(judgement)

    def log(self) -> None:
        """Have the signed log name the session as it is: an older copy is refused from here on."""
        log_signed(self._output, self.directory)

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
        """The session in `directory`. Raises ConfigError where its files are damaged, or somebody else changed them."""
        try:
            setup = Setup.model_validate_json(read_bounded(directory / SESSION))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory / SESSION}: cannot be read ({first_line(error)})") from None
        if directory.name != _name(setup):
            raise ConfigError(f"{directory / SESSION}: is not that of {directory.name}; restore it from a copy")
        return cls(directory, setup)


def session_directory(output: Path, setup: Setup) -> Path:
    """The directory of the session of `setup`, made if need be."""
    directory = output / SESSIONS / _name(setup)
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / SESSION).exists():
        write_atomic(directory / SESSION, json.dumps(setup.model_dump(mode="json"), indent=2) + "\n")
        sync(directory)
        sync(directory.parent)
    return directory


def read_sessions(output: Path) -> list[Session]:
    """Every session in the output directory, by name. Raises ConfigError where the files of one are damaged."""
    return [Session.read(path.parent) for path in sorted((output / SESSIONS).glob(f"*/{SESSION}"))]


def _name(setup: Setup) -> str:
    return comparison_name(setup.model_dump(mode="json"))


def _rows(path: Path, content: bytes, kind: type[Row]) -> list[Row]:
    """The rows of a file. Raises ConfigError where one is damaged."""
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            rows.append(kind.model_validate_json(line))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{path} line {number}: damaged ({reason}); restore the file from a copy") from None
    return rows
