"""Decisions about registered models: entries of the signed log.

MLflow lets anybody move an alias without a trace. Here every registration, promotion and rollback is an entry of the
log (see `log`); an alias that does not point where the last decision put it was moved by hand.
"""

from __future__ import annotations

import getpass
from collections import defaultdict
from pathlib import Path
from typing import Any

from xray_runtime.lineage.log import Decision, append_locked, log_lock, view


def decide(output: Path, private_key: Path, *, by: str | None = None, **fields: Any) -> None:
    """Append a decision; the same registration twice in a row is one.

    Args:
        by: who decides; by default the user of this process.
        fields: of a `log.Decision`.
    """
    decision = Decision(by=by or getpass.getuser(), **fields)
    with log_lock(output):
        last = current(output).get((decision.name, decision.alias)) if decision.action == "register" else None
        facts = {"version", "checkpoint", "evidence", "page"}
        if last is None or last.model_dump(include=facts) != decision.model_dump(include=facts):
            append_locked(output, private_key, decision)


def current(output: Path) -> dict[tuple[str, str], Decision]:
    """(registered model, alias) → the last decision about it; an audit says whether it is signed."""
    return view(output).decided


def decisions_by_version(output: Path) -> dict[tuple[str, str], list[Decision]]:
    """(registered model, version) → the decisions about it, in order."""
    found = defaultdict[tuple[str, str], list[Decision]](list)
    for decision in view(output).decisions:
        found[decision.name, decision.version].append(decision)
    return found
