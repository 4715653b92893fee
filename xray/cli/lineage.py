"""`xray lineage`, `xray diff` and `xray audit`: where a model came from, and whether that is still true."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from xray.cli.errors import one_line
from xray.deployments.local_services import quiet_environment
from xray_runtime.config.validation import ConfigError
from xray_runtime.credentials import strip_credentials
from xray_runtime.terminal import print_indented

if TYPE_CHECKING:
    from xray_runtime.lineage.audit.checkpoints import Audit
    from xray_runtime.lineage.log import Head
    from xray_runtime.lineage.reference import LineageStore

T = TypeVar("T")

BROKEN, BAD_INPUT = 1, 2

Ref = Annotated[
    str, typer.Argument(metavar="REF", help="Checkpoint directory, sha256, stage, or registered NAME@ALIAS.")
]
Output = Annotated[Path | None, typer.Option("--output", help="Output directory of the lifecycle that has REF.")]
Tracking = Annotated[
    str | None, typer.Option("--tracking-uri", help="MLflow's address. Default: the output directory's own store.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (lineage, diff, audit):
        app.command()(command)


def lineage(
    ref: Ref,
    output: Output = None,
    tracking_uri: Tracking = None,
    descendants: Annotated[bool, typer.Option("--descendants", help="Also show the checkpoints made from it.")] = False,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write an HTML page with a clickable graph.")] = None,
) -> None:
    """Show where a checkpoint came from.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.lineage.page import write_html
    from xray_runtime.lineage.reference import resolve, resolve_history
    from xray_runtime.lineage.render import lineage_json, lineage_text, selection

    # Only the whole graph has descendants, and the other checkpoints that a page compares this one with.
    read = resolve if descendants or html is not None else resolve_history
    place, node = checked(lambda: read(ref, output, tracking_uri))
    if html is not None:
        checked(lambda: write_html(html, place, node, selection(place.graph, node, descendants)))
    if as_json:
        print(json.dumps(lineage_json(place.graph, node, descendants), indent=2))
    else:
        sys.stdout.writelines(line + "\n" for line in lineage_text(place.graph, node, descendants))


def diff(
    first: Ref, second: Ref, output: Output = None, tracking_uri: Tracking = None, as_json: AsJson = False
) -> None:
    """Compare the histories of two checkpoints: config, data, code, versions, results.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.lineage.diff import diff as compute_diff, diff_text
    from xray_runtime.lineage.reference import resolve

    left = checked(lambda: resolve(first, output, tracking_uri))
    right = checked(lambda: resolve(second, output, tracking_uri))
    content = compute_diff(*left, *right)
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        sys.stdout.writelines(line + "\n" for line in diff_text(content))


def audit(
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="Checkpoint as in `xray lineage`, or a bundle; or use --all.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Audit everything in --output DIR.")] = False,
    output: Output = None,
    tracking_uri: Tracking = None,
    public_key: Annotated[
        Path | None,
        typer.Option("--public-key", help="Public key to trust. Default: keys/signing.pub in the output directory."),
    ] = None,
    hashing: Annotated[
        bool, typer.Option("--hash/--no-hash", help="Read the weights, or check their sizes alone.")
    ] = True,
    since_verified: Annotated[
        bool,
        typer.Option(
            "--since-verified", help="With --all: read only what changed since the last such audit that was sound."
        ),
    ] = False,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect", metavar="HEAD", help="Where the log ended once, as an audit printed it: nothing may be gone."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte, signature, record and pointer of a checkpoint and its ancestors.

    Exit codes: 0 sound, 1 not sound, 2 bad input.
    """
    from xray_runtime.lineage.audit.checkpoints import audit as run_audit
    from xray_runtime.lineage.bundle import audit_bundle
    from xray_runtime.lineage.reference import open_lineage_store, resolve

    if since_verified and (not everything or not hashing):
        checked(lambda: _refuse("--since-verified: needs --all, and not --no-hash"))
    head = checked(lambda: _head(expect))
    if ref is not None and not everything and Path(ref).is_file():
        bundle = Path(ref)
        report(checked(lambda: audit_bundle(bundle, public_key, hashing=hashing)), hashing, as_json)
        return

    unreadable = _unreadable(Path(ref)) if ref is not None and not everything else None
    if unreadable is not None:
        report(unreadable, hashing, as_json)
        return

    def chosen() -> tuple[Any, Any]:
        if everything == (ref is not None):
            raise ConfigError("REF, --all: exactly one of them is required")
        if public_key is not None and not public_key.is_file():
            raise ConfigError(f"--public-key: {str(public_key)!r} is not a file")
        if ref is None:
            if output is None:
                raise ConfigError("--all: needs --output DIR")
            return open_lineage_store(output, tracking_uri), None
        place, node = resolve(ref, output, tracking_uri)
        return place, [node]

    place, starts = checked(chosen)
    with audit_progress(Console(stderr=True)) as on_progress:
        result = run_audit(
            place,
            starts,
            public=public_key,
            hashing=hashing,
            since_verified=since_verified,
            expect=head,
            on_progress=on_progress,
        )
    checkpoints = {node.sha256 for node in starts} if starts is not None else None
    report(result, hashing, as_json, mlflow_pages(place, checkpoints))


@contextlib.contextmanager
def audit_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Shows, at a terminal, how far an audit has come; gives what the audit calls."""
    with console.status("auditing") as status:
        yield lambda done, total: status.update(f"auditing: {done} of {total} checkpoints read")


def mlflow_pages(place: LineageStore, checkpoints: set[str] | None) -> list[str]:
    """Addresses of the registered versions of `checkpoints` (None: of all), or the command that shows them."""
    from xray_runtime.lineage.model_page import model_addresses

    uri = place.tracking_uri
    if uri is None:
        return []
    addresses = model_addresses(place.output, checkpoints)
    if uri.startswith("http"):
        return [f"{strip_credentials(uri).rstrip('/')}/{address}" for address in addresses]
    return [f"mlflow ui --backend-store-uri {uri}, then http://127.0.0.1:5000/{address}" for address in addresses]


def _head(text: str | None) -> Head | None:
    from xray_runtime.lineage.log import Head

    try:
        return Head.parse(text) if text is not None else None
    except ValueError as error:
        raise ConfigError(f"--expect: {error}") from None


def _refuse(reason: str) -> None:
    raise ConfigError(reason)


def _unreadable(directory: Path) -> Audit | None:
    """The audit of a checkpoint whose manifest cannot even be read: that is a finding, no mistake of the user's."""
    from xray_runtime.lineage.audit.checkpoints import Audit
    from xray_runtime.lineage.audit.findings import Finding
    from xray_runtime.store.checkpoints import read_manifest
    from xray_runtime.store.manifest import MANIFEST

    if not directory.is_dir() or not os.path.lexists(directory / MANIFEST):
        return None
    try:
        read_manifest(directory)
    except ValueError as error:
        return Audit(findings=[Finding(directory.name, "manifest-malformed", str(error))])
    return None


def report(result: Audit, hashing: bool, as_json: bool, pages: Sequence[str] = ()) -> None:
    """Print an audit and exit by what it found.

    Args:
        pages: where MLflow shows what was audited.
    """
    from xray_runtime.lineage.render import printable

    if as_json:
        print(json.dumps(result.to_json() | {"pages": list(pages)}, indent=2))
        raise typer.Exit(0 if result.is_sound else BROKEN)
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
    read = "read" if hashing else "looked at, contents not read"
    if result.unchanged:
        read = f"in all, {result.checkpoints - result.unchanged} checkpoints read"
    print(f"{'sound' if result.is_sound else 'NOT SOUND'}: {size} {read}")
    raise typer.Exit(0 if result.is_sound else BROKEN)


def checked(call: Callable[[], T]) -> T:
    """What `call` returns; bad input is one line and exit code 2."""
    quiet_environment()
    with one_line():
        return call()
