"""The signed log in an audit: whether it is whole, and what it says must be there."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from xray_runtime.errors import first_line
from xray_runtime.evidence.lines import ChainProblem, sound_lines
from xray_runtime.evidence.log import END, LOG, read_lines
from xray_runtime.evidence.view import Head, Line, LogView
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.log import END_TYPE
from xray_runtime.lineage.recorded import ChainView
from xray_runtime.lineage.signing import Verifier
from xray_runtime.store.checkpoints import CHECKPOINTS, read_bounded


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


def check_end(output: Path, view: LogView, verifier: Verifier | None) -> Iterator[Finding]:
    """A log that can be read to its end against its signed end."""
    if verifier is not None and (reason := _end_problem(output / END, view, verifier)):
        yield Finding(LOG, "log-shorter", reason)


def _end_problem(path: Path, view: LogView, verifier: Verifier) -> str | None:
    """Why the signed end of the log is not the end of this one; None where it is."""
    if not os.path.lexists(path):
        return f"{END}, which is signed with each entry, is missing"
    try:
        content = read_bounded(path)
        # Each entry replaces it, so a retired key signs none that counts.
        verifier.check_envelope(content)
        envelope = json.loads(content)
        sha256 = (
            json.loads(base64.b64decode(envelope["payload"]))["sha256"] if envelope["payloadType"] == END_TYPE else ""
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{END}, which is signed with each entry, does not count ({first_line(error)})"
    # A process that was killed between the two leaves the end of the line before.
    return None if sha256 in view.heads[-2:] else f"{END} names {str(sha256)[:12]}, which is not its last entry"


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
