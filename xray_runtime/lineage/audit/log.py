"""The signed log in an audit: whether it is whole, and what it says must be there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.log import LOG, LogView, read_lines
from xray_runtime.lineage.log_entries import Head, Line
from xray_runtime.lineage.recorded import ChainView
from xray_runtime.lineage.signed_lines import ChainProblem, sound_lines
from xray_runtime.lineage.signing import Verifier
from xray_runtime.store.checkpoints import CHECKPOINTS


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


def check_heads(view: LogView, heads: Mapping[str, Head | None]) -> Iterator[Finding]:
    """The log against heads that were kept; `heads`: who kept it → head."""
    for who, head in heads.items():
        reason = view.lacks(head) if head is not None else None
        if reason is not None:
            yield Finding(LOG, "log-shorter", f"{reason} ({who})")


def check_published(view: LogView, nodes: Iterable[Node], everything: bool, is_open: bool) -> Iterator[Finding]:
    """The log against the checkpoints of the store.

    Args:
        is_open: whether a run may have been cut short between a checkpoint and its entry.
    """
    there = {node.directory.name: node for node in nodes}
    for name, node in there.items():
        entry = view.published.get(name)
        if entry is None or entry.checkpoint != node.sha256:
            detail = f"{CHECKPOINTS}/{name} is in no entry of {LOG}"
            yield Finding(node.name, "checkpoint-new" if is_open else "checkpoint-unlogged", detail)
    if everything:
        for name, entry in view.published.items():
            if name not in there:
                yield Finding(name, "checkpoint-missing", f"{LOG} says {entry.checkpoint[:12]} was published")
