"""Verdicts that are not published in an audit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.kinds.signed_files import SignedDirectories
from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.kernel.history.audit_check import AuditCheck, Audited, Finding, Meaning
from xray_runtime.kernel.history.comparisons import JUDGEMENTS, REPLIES, SESSION, SESSIONS, comparison_name
from xray_runtime.kernel.history.signed_files import read_signed
from xray_runtime.kernel.store.checkpoints import read_bounded

CODES = {
    "comparison-broken": Meaning(
        "Verdicts of `xray compare` were changed or removed, or an older copy was put in their place.",
        "Restore the newest copy of the session: nothing learns from it until then.",
    ),
}


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


def _check(audited: Audited) -> Iterator[Finding]:
    yield from check_comparisons(audited.store.output, audited.log, audited.verifier)


CHECK = AuditCheck("verdicts of `xray compare` that are not published", CODES, _check, needs=frozenset({"whole"}))
