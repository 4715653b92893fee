"""The records of nights: what each works with, and how it ended (`flywheel/NIGHT/night.json`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from xray_runtime.config.validation import ConfigError
from xray_runtime.files import write_atomic
from xray_runtime.lineage.gates import Gate

CANARY = "canary"
"""State of a night whose candidate answers a share of the requests."""
FOLDER, FILE = "flywheel", "night.json"
RELEASABLE = ("held",)
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
    """All nights, the first first. Raises ConfigError where the record of one is damaged."""
    nights = []
    for path in sorted((output / FOLDER).glob(f"*/{FILE}")):
        try:
            nights.append(Night.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{path}: damaged ({str(error).splitlines()[0]}); restore it from a copy") from None
    return nights


def write_night(output: Path, night: Night) -> None:
    """Keep the record of a night."""
    place = place_of(output, night)
    place.mkdir(parents=True, exist_ok=True)
    write_atomic(place / FILE, night.model_dump_json(indent=2) + "\n")


def place_of(output: Path, night: Night) -> Path:
    """The directory of a night's records."""
    return output / FOLDER / f"{night.number:04d}"


def night_markdown(night: Night) -> str:
    """A night for people."""
    lines = [f"**Night {night.number}: {night.state}**", "", *(f"- {reason}" for reason in night.reasons)]
    lines += ["", "| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in night.numbers.items())]
    for name, gates in night.gates.items():
        lines += ["", f"Gates, {name} prompts:", ""]
        lines += [f"- {'passes' if gate.passed else 'FAILS'} {gate.name}: {gate.reason}" for gate in gates]
    return "\n".join(lines)
