"""The records of cycles: what each works with, and how it ended.

The signed log has them; `flywheel/CYCLE/cycle.json` is a copy for people.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.cycle import Cycles, CycleWritten
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.promotion_check import Gate
from xray_runtime.kernel.report.rendering import markdown_table

CANARY = "canary"
"""State of a cycle whose candidate answers a share of the requests."""
FOLDER, FILE = "flywheel", "cycle.json"
DONE = ("held", "too little", "refused", "candidate", "rolled back", "undecided")


class Cycle(BaseModel):
    """One cycle: what it works with, and how it ended."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    number: int
    first: int
    """First and last of its segments."""
    last: int
    feedback: list[str]
    """sha256 of the feedback of the cycles that it trains on; its own is the last."""
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


def read_cycles(output: Path) -> list[Cycle]:
    """All cycles in order, from the signed log. Raises ConfigError if a file differs from it."""
    cycles = [Cycle.model_validate(entry.cycle) for _, entry in sorted(view(output).state(Cycles).items())]
    known = {cycle_directory(output, cycle) / FILE: cycle for cycle in cycles}
    for path in sorted((output / FOLDER).glob(f"*/{FILE}")):
        if path not in known or path.read_text(encoding="utf-8", errors="replace") != _text(known[path]):
            raise ConfigError(
                f"{path}: is not what the signed log has; move it away, and the next cycle writes it again"
            )
    return cycles


def write_cycle(output: Path, cycle: Cycle) -> None:
    """Keep the record of a cycle: in the signed log, and as a file for people."""
    path = cycle_directory(output, cycle) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    # After a crash the file is missing, and is written again; a file that differs from the log is not ours.
    path.unlink(missing_ok=True)
    entry = CycleWritten(number=cycle.number, cycle=cycle.model_dump(mode="json"))
    sha = hashlib.sha256(_text(cycle).encode()).hexdigest()
    evidence().append(output, entry, {path.relative_to(output).as_posix(): sha})
    write_atomic(path, _text(cycle))


def restore_files(output: Path, cycles: list[Cycle]) -> None:
    """Write the files again that are missing."""
    for cycle in cycles:
        path = cycle_directory(output, cycle) / FILE
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, _text(cycle))


def cycle_directory(output: Path, cycle: Cycle) -> Path:
    """The directory of a cycle's records."""
    return output / FOLDER / f"{cycle.number:04d}"


def _text(cycle: Cycle) -> str:
    return cycle.model_dump_json(indent=2) + "\n"


def cycle_markdown(cycle: Cycle) -> str:
    """A cycle for people."""
    lines = [f"**Cycle {cycle.number}: {cycle.state}**", "", *(f"- {reason}" for reason in cycle.reasons)]
    lines += ["", *markdown_table(("", ""), [(name, str(value)) for name, value in cycle.numbers.items()])]
    for name, gates in cycle.gates.items():
        lines += ["", f"Gates, {name} prompts:", ""]
        lines += [f"- {'passes' if gate.passed else 'FAILS'} {gate.name}: {gate.reason}" for gate in gates]
    return "\n".join(lines)
