"""Decisions about registered models: entries of the signed log.

MLflow lets anybody move an alias without a trace. Here every registration, promotion and roll-back is an entry of the
log (see `log`); an alias that does not point where the last decision put it was moved by hand.
"""

from __future__ import annotations

import getpass
from collections import defaultdict
from pathlib import Path
from typing import Any

from xray_runtime.lineage.log import Action, Decision, append_locked, log_lock, readable_lines

MOVES = ("register", "promote", "rollback")
"""Actions after which an alias points somewhere else."""


def decide(
    output: Path,
    private_key: Path,
    *,
    action: Action,
    name: str = "",
    alias: str = "",
    version: str = "",
    checkpoint: str,
    note: str = "",
    by: str | None = None,
    gates: list[dict[str, Any]] | None = None,
    gates_from: str = "",
    evidence: dict[str, str] | None = None,
    page: int = 0,
) -> None:
    """Append a decision. The same registration twice in a row is one."""
    decision = Decision(
        action=action,
        name=name,
        alias=alias,
        version=version,
        checkpoint=checkpoint,
        by=by or getpass.getuser(),
        note=note,
        gates=gates or [],
        gates_from=gates_from,
        evidence=evidence or {},
        page=page,
    )

    def facts(said: Decision) -> tuple[Any, ...]:
        return said.version, said.checkpoint, said.evidence, said.page

    with log_lock(output):
        last = current(output).get((name, alias)) if action == "register" else None
        if last is None or facts(last) != facts(decision):
            append_locked(output, private_key, decision)


def decisions(output: Path) -> list[Decision]:
    """All decisions, in order; an audit says whether they are signed."""
    return [line.entry for line in readable_lines(output) if isinstance(line.entry, Decision)]


def current(output: Path) -> dict[tuple[str, str], Decision]:
    """(registered model, alias) → the last decision about it."""
    return {(found.name, found.alias): found for found in decisions(output) if found.action in MOVES}


def decisions_by_version(output: Path) -> dict[tuple[str, str], list[Decision]]:
    """(registered model, version) → the decisions about it, in order."""
    found = defaultdict[tuple[str, str], list[Decision]](list)
    for decision in decisions(output):
        found[decision.name, decision.version].append(decision)
    return found


def pruned(output: Path) -> set[str]:
    """Checkpoints whose removal was decided."""
    return {found.checkpoint for found in decisions(output) if found.action == "prune"}
