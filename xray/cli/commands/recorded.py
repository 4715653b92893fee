"""`xray recorded`: the answers and the feedback that `xray serve --record` kept, and whether they are sound."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from xray.cli.conversation import shown
from xray.cli.exit_codes import FAILED
from xray.cli.options import AsJson, PublicKey
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.terminal import print_indented

PANEL = "Evidence"


def command(
    output: Annotated[Path, typer.Option(help="Output directory that was served with --record.")],
    user: Annotated[str | None, typer.Option(help="Only records of this user, as the requests named them.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of records shown, newest first; 0: all.")] = 20,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Show recorded answers and feedback, and check that none was edited, removed or replayed.

    Exit codes: 0 sound, 1 broken, 2 bad input.
    """
    from xray_runtime.kernel.evidence.envelope import Verifier
    from xray_runtime.kernel.history.audit_check import read_log
    from xray_runtime.kernel.history.recorded import CHAIN, RecordedReader
    from xray_runtime.kernel.history.reference import open_lineage_store
    from xray_runtime.trust.audit.checks.recorded import check_recorded
    from xray_runtime.trust.keys import trusted_keys

    if not (output / "recorded").is_dir():
        raise ConfigError(f"--output: {str(output)!r} has no recorded answers: record some with `xray serve --record`")
    try:
        verifier = Verifier(trusted_keys(output, public_key))
    except ValueError as error:
        raise ConfigError(f"--public-key: {error}") from None
    log = read_log(output, verifier)[0].folded.view
    findings = sorted(set(check_recorded(open_lineage_store(output, None), log, verifier, hashing=True)))
    broken = {finding.subject for finding in findings}
    # Segments that no sound chain names are not shown.
    reader = RecordedReader(output, is_sound=not any(CHAIN in subject for subject in broken))
    rows = list(reader.rows(user, broken, limit or None))
    summary = {"answers": reader.answers, "feedback": reader.feedback, "lost": reader.chain.lost}
    if as_json:
        listed = [finding.to_json() for finding in findings]
        print(json.dumps({"sound": not findings, **summary, "findings": listed, "records": rows}, indent=2))
    else:
        _show(Console(), rows)
        lost = "".join(f"; {count} lost: {reason}" for reason, count in reader.chain.lost.items())
        print(f"{len(rows)} shown of {reader.answers} answers and {reader.feedback} feedback{lost}")
        for finding in findings:
            print(f"BROKEN {finding.subject}: {finding.detail}", file=sys.stderr)
    raise typer.Exit(FAILED if findings else 0)


def _show(console: Console, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        at = datetime.fromtimestamp(row["at_ms"] / 1000, UTC).isoformat(sep=" ", timespec="seconds")
        title = f"{at} {row['kind']} {row['id']}, user {row['user'][:12]}, model {row['model'][:12]}"
        print_indented(console, "", title, "bold")
        if row["kind"] == "answer":
            numbers = f"{row['latency_s']:.2f} s, {row['prompt_tokens']} + {row['reply_tokens']} tokens"
            print_indented(console, "  numbers  ", numbers + ("" if row["complete"] else ", broken off"))
        else:
            print_indented(console, "  about    ", row["answer"])
        texts = row["texts"] if row["texts"] is not None else {"texts": "(deleted)"}
        for name, value in texts.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            print_indented(console, f"  {name:9}", shown(text))
        console.print()
