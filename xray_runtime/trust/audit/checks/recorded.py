"""Recorded answers in an audit: their chain and their models."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.kinds.recorded import RecordedEnd
from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.kernel.history.audit_check import ASK, AuditCheck, Audited, Finding, Meaning, add_sound_lines
from xray_runtime.kernel.history.recorded import CHAIN, ChainView, read_chain
from xray_runtime.kernel.history.recorded_rows import KEYS, RECORDED, read_segment, segment_name
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.identity import file_sha256

MAX_SEGMENT_BYTES = 2**32
"""Larger than any segment; a sparse file claims any size."""

CODES = {
    "recorded-broken": Meaning(
        "Recorded answers and their signed chain disagree: a segment was edited, removed, replayed or put there.",
        f"{ASK} Do not learn from them: move `recorded` away, or restore it from a copy.",
    ),
    "recorded-shorter": Meaning(
        "Lines were taken off the chain of recorded answers, or an older one put in its place.", ASK
    ),
    "recorded-readable": Meaning(
        "Other users can, or could, read the keys of recorded texts.",
        "Set the mode of `recorded/keys` to 0700, and of the files in it to 0600.",
    ),
    "recorded-foreign": Meaning("Recorded answers name a model that was never in this store.", ASK),
}


def check_recorded(store: LineageStore, log: LogView, verifier: Verifier | None, hashing: bool) -> Iterator[Finding]:
    """Every segment against the signed chain, and the chain against its end in the signed log.

    Args:
        hashing: without it the segments are not read.
    """
    directory, chain = store.output / RECORDED, ChainView()
    lines = read_chain(store.output)
    if broken := add_sound_lines(chain, lines, verifier, f"{RECORDED}/{CHAIN}", "recorded-broken"):
        yield from broken
        return
    last = log.state(RecordedEnd).head
    if chain.lacks(last):
        detail = f"it has {len(chain.heads)} lines; the log names line {last.entries}, {last.sha256[:12]}"
        yield Finding(f"{RECORDED}/{CHAIN}", "recorded-shorter", detail)
    for number, sha256 in chain.segments.items():
        reason = _difference(directory / segment_name(number), sha256, hashing)
        if reason is not None:
            yield Finding(f"{RECORDED}/{segment_name(number)}", "recorded-broken", reason)
        elif hashing:
            yield from _check_models(store, log, directory / segment_name(number))
    # A segment after the last one is that of a recorder which was killed before it signed it: nothing reads it.
    allowed = {segment_name(number) for number in (*chain.segments, chain.last + 1)}
    for path in sorted(directory.glob("*.parquet")):
        if path.name not in allowed:
            yield Finding(f"{RECORDED}/{path.name}", "recorded-broken", f"no line of {CHAIN} names it")
    yield from _check_modes(directory / KEYS)


def _difference(path: Path, sha256: str, hashing: bool) -> str | None:
    if path.is_symlink() or not path.is_file():
        return "it is missing, or a link" if os.path.lexists(path.parent) else "the directory is missing"
    try:
        return "its bytes were changed" if hashing and file_sha256(path, MAX_SEGMENT_BYTES) != sha256 else None
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _check_modes(keys: Path) -> Iterator[Finding]:
    for path in [keys, *sorted(keys.glob("*"))] if keys.is_dir() else []:
        if mode := stat.S_IMODE(path.lstat().st_mode) & 0o077:
            yield Finding(f"{RECORDED}/{KEYS}", "recorded-readable", f"{path.name}: others have mode {mode:03o}")
            return


def _check_models(store: LineageStore, log: LogView, path: Path) -> Iterator[Finding]:
    try:
        models = {row["model"] for row in read_segment(path, ["model"])}
    except ValueError as error:
        yield Finding(f"{RECORDED}/{path.name}", "recorded-broken", str(error))
        return
    for model in sorted(models - store.graph.nodes.keys() - log.pruned):
        yield Finding(f"{RECORDED}/{path.name}", "recorded-foreign", f"model {model[:12]}")


def _check(audited: Audited) -> Iterator[Finding]:
    yield from check_recorded(audited.store, audited.log, audited.verifier, audited.hashing)


CHECK = AuditCheck(
    "recorded answers against their signed chain, and who can read their keys",
    CODES,
    _check,
    needs=frozenset({"whole"}),
)
