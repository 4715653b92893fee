"""The signed log in an audit: whether it is whole, and what it says must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.evidence.lines import ChainProblem, sound_lines
from xray_runtime.evidence.log import LOG, read_lines
from xray_runtime.evidence.view import Line, LogView
from xray_runtime.lineage.audit_check import Finding
from xray_runtime.lineage.recorded import ChainView
from xray_runtime.lineage.signing import Verifier


def add_sound_lines(
    view: LogView | ChainView, lines: Iterator[Line], verifier: Verifier | None, name: str, code: str
) -> list[Finding]:
    """Add the lines of the file `name` to a view, up to the first that is not sound: a finding with this code."""
    try:
        for line in sound_lines(lines, verifier):
            view.add(line)
    except ValueError as error:
        number = f" {error.number}" if isinstance(error, ChainProblem) else ""
        return [Finding(f"{name}{number}", code, str(error))]
    return []


def read_log(output: Path, verifier: Verifier | None) -> tuple[LogView, list[Finding]]:
    """(state that the sound entries describe, findings)."""
    view = LogView()
    found = add_sound_lines(view, read_lines(output), verifier, LOG, "log-broken")
    if not os.path.lexists(output / LOG):
        found.append(Finding(LOG, "log-missing", f"there is no {LOG} in {output.name}"))
    return view, found
