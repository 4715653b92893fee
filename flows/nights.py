"""The records of nights: what each works with, and how it ended.

The signed log has them; `flywheel/NIGHT/night.json` is a copy for people.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from xray_runtime.config.validation import ConfigError
from xray_runtime.evidence.kinds.night import Nights, NightWritten
from xray_runtime.evidence.log import view
from xray_runtime.files import write_atomic
from xray_runtime.lineage.log import append
from xray_runtime.lineage.promotion_check import Gate
from xray_runtime.lineage.signing import signing_key
from xray_runtime.report.rendering import markdown_table

CANARY = "canary"
"""State of a night whose candidate answers a share of the requests."""
FOLDER, FILE = "flywheel", "night.json"
DONE = ("held", "too little", "refused", "candidate", "rolled back", "undecided")


class Night(BaseModel):
    """One night: what it works with, and how it ended."""

    model_config = ConfigDict(extra="forbid")

    number: int
    first: int
    """First and last of its segments."""
    last: int
    feedback: list[str]
    """sha256 of the feedback of the nights that it trains on; its own is the last."""
    verdicts: str | None
    """sha256 of the verdicts of `xray compare`, where there are any."""
    start: str
    """sha256 of the policy it starts from."""
    data: str
    """sha256 of the dataset whose held-out prompts are the fixed set."""
    state: str = "begun"
    reasons: list[str] = []
    """Why it is held, or what was too little, or which gates failed."""
    numbers: dict[str, Any] = {}
    """`curate`'s counts."""
    gates: dict[str, list[Gate]] = {}
    """`fixed` and `recorded` → results of the gates."""
    policy: str | None = None
    """sha256 of the candidate."""
    canary: str | None = None
    """Id of its canary; the signed log has the rest."""


def read_nights(output: Path) -> list[Night]:
    """All nights in order, from the signed log. Raises ConfigError if a file differs from it."""
    nights = [Night.model_validate(entry.night) for _, entry in sorted(view(output).state(Nights).items())]
    known = {place_of(output, night) / FILE: night for night in nights}
    for path in sorted((output / FOLDER).glob(f"*/{FILE}")):
        if path not in known or path.read_text(encoding="utf-8", errors="replace") != _text(known[path]):
            raise ConfigError(
                f"{path}: is not what the signed log has; move it away, and the next night writes it again"
            )
    return nights


def write_night(output: Path, night: Night) -> None:
    """Keep the record of a night: in the signed log, and as a file for people."""
    path = place_of(output, night) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    # After a crash the file is missing, and is written again; a file that differs from the log is not ours.
    path.unlink(missing_ok=True)
    entry = NightWritten(number=night.number, night=night.model_dump(mode="json"))
    sha = hashlib.sha256(_text(night).encode()).hexdigest()
    append(output, signing_key(output), entry, {path.relative_to(output).as_posix(): sha})
    write_atomic(path, _text(night))


def restore_files(output: Path, nights: list[Night]) -> None:
    """Write the files again that are missing."""
    for night in nights:
        path = place_of(output, night) / FILE
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, _text(night))


def place_of(output: Path, night: Night) -> Path:
    """The directory of a night's records."""
    return output / FOLDER / f"{night.number:04d}"


def _text(night: Night) -> str:
    return night.model_dump_json(indent=2) + "\n"


def night_markdown(night: Night) -> str:
    """A night for people."""
    lines = [f"**Night {night.number}: {night.state}**", "", *(f"- {reason}" for reason in night.reasons)]
    lines += ["", *markdown_table(("", ""), [(name, str(value)) for name, value in night.numbers.items()])]
    for name, gates in night.gates.items():
        lines += ["", f"Gates, {name} prompts:", ""]
        lines += [f"- {'passes' if gate.passed else 'FAILS'} {gate.name}: {gate.reason}" for gate in gates]
    return "\n".join(lines)
