"""What stages keep and read again, in an audit: kept tokens, states and log-probabilities, snapshots, answers.

Training reads nothing of it that is not sealed (`store.seal`); what is not was planted or edited, and is named here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from xray_runtime.data.derived import SUFFIX
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.signing import TrustedKey
from xray_runtime.rewards.journal import ANSWERS, purpose_of_answers, read_entry
from xray_runtime.store.checkpoints import CHECKPOINTS, read_bounded
from xray_runtime.store.seal import SEALED, Seal
from xray_runtime.store.snapshots import SNAPSHOTS, snapshot_problem, snapshot_purpose

MAX_ANSWERS_BYTES = 2**30


def check_kept(output: Path, trusted: Sequence[TrustedKey], hashing: bool) -> Iterator[Finding]:
    """Every kept file that no trusted key sealed.

    Args:
        hashing: without it the large ones are not read.
    """
    seal = Seal(None, [read_bounded(key.path) for key in trusted])
    if hashing:
        for folder in sorted((output / CHECKPOINTS).glob(f"*{SUFFIX}")):
            for path in sorted(folder.iterdir()):
                # Beside them: seals, locks, and what was being written when a process was killed.
                beside = path.suffix in (SEALED, ".lock", ".building") or path.suffix.startswith(".writing-")
                if not beside and not seal.is_sealed(path):
                    yield _finding(output, path, "it is not sealed")
    for stage in sorted((output / SNAPSHOTS).glob("*")):
        for place in sorted(stage.glob("step-" + "[0-9]" * 10)) if hashing else []:
            problem = snapshot_problem(place, snapshot_purpose(place), seal)
            if problem is not None:
                yield _finding(output, place, problem)
        yield from _check_answers(output, stage / ANSWERS, seal)


def _check_answers(output: Path, path: Path, seal: Seal) -> Iterator[Finding]:
    if not os.path.lexists(path):
        return
    try:
        lines = read_bounded(path, MAX_ANSWERS_BYTES).splitlines(keepends=True)
    except (OSError, ValueError) as error:
        yield _finding(output, path, f"it cannot be read ({type(error).__name__})")
        return
    # A line without its end was cut short by a kill, and is dropped.
    whole = [line for line in lines if line.endswith(b"\n")]
    unsealed = [n for n, line in enumerate(whole, 1) if read_entry(line, purpose_of_answers(path.parent), seal) is None]
    if unsealed:
        yield _finding(output, path, f"{len(unsealed)} of its lines are not sealed, the first is {unsealed[0]}")


def _finding(output: Path, path: Path, reason: str) -> Finding:
    return Finding(path.relative_to(output).as_posix(), "kept-unsealed", reason)
