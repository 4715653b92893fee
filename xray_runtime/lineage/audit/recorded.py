"""People's data in an audit: recorded answers with their chain and models, and verdicts that are not published."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.config.validation import ConfigError
from xray_runtime.data.recorded import KEYS, RECORDED, read_segment, segment_name
from xray_runtime.evidence.kinds.recorded import RecordedEnd
from xray_runtime.evidence.kinds.signed_files import SignedDirectories
from xray_runtime.evidence.view import LogView
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.audit.log import add_sound_lines
from xray_runtime.lineage.comparisons import JUDGEMENTS, REPLIES, SESSION, SESSIONS, comparison_name
from xray_runtime.lineage.recorded import CHAIN, ChainView, read_chain
from xray_runtime.lineage.reference import LineageStore
from xray_runtime.lineage.signed_files import read_signed
from xray_runtime.lineage.signing import Verifier
from xray_runtime.store.checkpoints import read_bounded
from xray_runtime.store.identity import file_sha256

MAX_SEGMENT_BYTES = 2**32
"""Larger than any segment; a sparse file claims any size."""


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
        return "its bytes are others" if hashing and file_sha256(path, MAX_SEGMENT_BYTES) != sha256 else None
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


def check_comparisons(output: Path, log: LogView, verifier: Verifier | None) -> Iterator[Finding]:
    """Every comparison that is there, and every one that the log knows of."""
    there = {path for path in (output / SESSIONS).glob("*") if path.is_dir()}
    logged = {output / name for name in log.state(SignedDirectories) if name.startswith(f"{SESSIONS}/")}
    for directory in sorted(there | logged):
        reason = _problem(output, directory, verifier)
        if reason is not None:
            yield Finding(directory.relative_to(output).as_posix(), "comparison-broken", reason)


def _problem(output: Path, directory: Path, verifier: Verifier | None) -> str | None:
    try:
        # The models and prompts are in its name.
        if comparison_name(json.loads(read_bounded(directory / SESSION))) != directory.name:
            return f"{SESSION} is not that of {directory.name}"
        read_signed(output, directory, (REPLIES, JUDGEMENTS), verifier)
    except ConfigError as error:
        return str(error).removeprefix(f"{directory}/")
    except (OSError, ValueError, RecursionError) as error:
        return f"{SESSION} cannot be read ({type(error).__name__})"
    return None
