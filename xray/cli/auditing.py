"""The progress of an audit at a terminal, and its findings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from xray.cli.exit_codes import FAILED
from xray_runtime.kernel.terminal import print_indented

if TYPE_CHECKING:
    from xray_runtime.trust.audit.checkpoints import Audit


@contextlib.contextmanager
def audit_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of an audit at a terminal; yields the callback for the audit."""
    with console.status("auditing") as status:
        yield lambda done, total: status.update(f"auditing: {done} of {total} checkpoints read")


def report(result: Audit, hashing: bool, as_json: bool, pages: Sequence[str] = ()) -> NoReturn:
    """Print an audit and exit: 0 if it is sound, else 1.

    Args:
        pages: MLflow pages of the audited models.
    """
    from xray_runtime.kernel.history.render import printable

    if as_json:
        print(json.dumps(result.to_json() | {"pages": list(pages)}, indent=2))
        raise typer.Exit(0 if result.is_sound else FAILED)
    console = Console()
    for finding in result.findings:
        content = finding.to_json()
        word = "BROKEN" if finding.is_broken else "note  "
        print_indented(console, f"{word} ", f"{finding.code}: {printable(finding.subject)}")
        print_indented(console, "       ", printable(finding.detail))
        print_indented(console, "       ", f"{content['meaning']} {content['mend']}".rstrip())
    for note in result.notes:
        print_indented(console, "", printable(note))
    if result.log.entries:
        print(f"log: {result.log.entries} entries; keep its head for --expect: {result.log}")
    for page in pages:
        print_indented(console, "in MLflow: ", page)
    size = f"{result.checkpoints} checkpoints, {result.files} files, {result.bytes / 1e6:,.1f} MB"
    read = "read" if hashing else "present, contents not read"
    if result.unchanged:
        read = f"in all, {result.checkpoints - result.unchanged} checkpoints read"
    print(f"{'sound' if result.is_sound else 'NOT SOUND'}: {size} {read}")
    raise typer.Exit(0 if result.is_sound else FAILED)
