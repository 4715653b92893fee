"""The signed log in an audit: whether it is whole, and what it says must be there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.log import LOG, Head, LogView as LogView, read_lines
from xray_runtime.lineage.signed_lines import ChainProblem, sound_lines
from xray_runtime.lineage.signing import Verifier
from xray_runtime.store.checkpoints import CHECKPOINTS


def read_log(output: Path, verifier: Verifier | None) -> tuple[LogView, list[Finding]]:
    """(state that the sound entries describe, findings): reading stops at the first entry that is not sound."""
    view, found = LogView(), list[Finding]()
    try:
        for line in sound_lines(read_lines(output), verifier):
            view.add(line)
    except ChainProblem as problem:
        found.append(Finding(f"{LOG} {problem.number}", "log-broken", str(problem)))
    except ValueError as error:
        found.append(Finding(LOG, "log-broken", str(error)))
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
