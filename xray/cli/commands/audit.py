"""`xray audit`: whether a checkpoint and its history are what was published."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from xray.cli.auditing import audit_progress, report
from xray.cli.options import AsJson, Output, PublicKey, Tracking
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.credentials import strip_credentials

if TYPE_CHECKING:
    from xray_runtime.kernel.evidence.view import Head
    from xray_runtime.kernel.history.graph import Node
    from xray_runtime.kernel.history.reference import LineageStore
    from xray_runtime.trust.audit.checkpoints import Audit

PANEL = "Evidence"
NO_WITNESS = (
    "no witness: an audit cannot notice a directory that was set back to an older state, or a log that its owner wrote "
    "anew (`xray witness use`, or --witness with a copy of log.checkpoint)"
)

WitnessAddress = Annotated[
    str | None,
    typer.Option(
        metavar="WITNESS",
        help="Directory or address of a witness, or a copy of log.checkpoint you kept. Default: the log's own.",
    ),
]
WitnessPublicKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="The witness's public key. Default: the one that the log names.")
]


def command(
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="Checkpoint as in `xray lineage`, or a bundle; or use --all.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Audit everything in --output DIR.")] = False,
    output: Output = None,
    tracking_uri: Tracking = None,
    public_key: PublicKey = None,
    hashing: Annotated[bool, typer.Option("--hash/--no-hash", help="Read weights, or only check their sizes.")] = True,
    since_verified: Annotated[
        bool, typer.Option("--since-verified", help="With --all: read only what changed since the last sound audit.")
    ] = False,
    expect: Annotated[
        str | None,
        typer.Option(metavar="HEAD", help="Head of the log that an earlier audit printed; it must still be there."),
    ] = None,
    witness: WitnessAddress = None,
    witness_key: WitnessPublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte, signature, record and pointer of a checkpoint and its ancestors.

    Exit codes: 0 sound, 1 not sound, 2 bad input.
    """
    from xray_runtime.trust.audit.checkpoints import audit as run_audit

    if since_verified and (not everything or not hashing):
        raise ConfigError("--since-verified: needs --all, and not --no-hash")
    head = _head(expect)
    _check_witness(witness, witness_key)
    if ref is not None and not everything:
        path = Path(ref)
        if path.is_file() and (witness or witness_key):
            raise ConfigError("--witness, --witness-key: not for a bundle; docs/verify-without-xray.md checks its log")
        audited = _bundle(path, public_key, hashing) if path.is_file() else _unreadable(path)
        if audited is not None:
            report(audited, hashing, as_json)
    if everything == (ref is not None):
        raise ConfigError("REF, --all: exactly one is required")
    if public_key is not None and not public_key.is_file():
        raise ConfigError(f"--public-key: {str(public_key)!r} is not a file")
    store, starts = _audited(ref, output, tracking_uri)
    with audit_progress(Console(stderr=True)) as on_progress:
        result = run_audit(
            store,
            starts,
            public=public_key,
            hashing=hashing,
            since_verified=since_verified,
            expect=head,
            witness=witness or "",
            witness_key=witness_key or "",
            on_progress=on_progress,
        )
    if not result.is_witnessed:
        result.notes.append(NO_WITNESS)
    report(result, hashing, as_json, mlflow_pages(store, starts))


def _audited(ref: str | None, output: Path | None, tracking_uri: str | None) -> tuple[LineageStore, list[Node] | None]:
    """(where to audit, the checkpoint; None: all)."""
    from xray_runtime.kernel.history.reference import open_lineage_store, resolve

    if ref is not None:
        store, node = resolve(ref, output, tracking_uri)
        return store, [node]
    if output is None:
        raise ConfigError("--all: needs --output DIR")
    return open_lineage_store(output, tracking_uri), None


def mlflow_pages(store: LineageStore, nodes: Sequence[Node] | None) -> list[str]:
    """MLflow pages of the registered versions of `nodes` (None: all), or the command that shows them."""
    from xray_runtime.trust.model_page import model_addresses

    uri = store.tracking_uri
    if uri is None:
        return []
    addresses = model_addresses(store.output, None if nodes is None else {node.sha256 for node in nodes})
    if uri.startswith("http"):
        return [f"{strip_credentials(uri).rstrip('/')}/{address}" for address in addresses]
    return [f"mlflow ui --backend-store-uri {uri}, then http://127.0.0.1:5000/{address}" for address in addresses]


def _head(text: str | None) -> Head | None:
    from xray_runtime.kernel.evidence.view import Head

    try:
        return Head.parse(text) if text is not None else None
    except ValueError as error:
        raise ConfigError(f"--expect: {error}") from None


def _check_witness(witness: str | None, key: str | None) -> None:
    from xray_runtime.trust.note import WitnessKey
    from xray_runtime.trust.witness import is_server

    if witness is not None and not is_server(witness) and not (witness and Path(witness).exists()):
        raise ConfigError(f"--witness: {witness!r} is not allowed: must be a directory, a file, or http[s]://…")
    try:
        if key is not None:
            WitnessKey.parse(key)
    except ValueError as error:
        raise ConfigError(f"--witness-key: {error}") from None


def _bundle(path: Path, public_key: Path | None, hashing: bool) -> Audit:
    from xray_runtime.trust.bundle import audit_bundle
    from xray_runtime.trust.iteration.bundle import is_iteration

    if is_iteration(path):
        raise ConfigError(f"REF: {str(path)!r} is not allowed: it has one iteration; `xray replay {path}` checks it")
    return audit_bundle(path, public_key, hashing=hashing)


def _unreadable(directory: Path) -> Audit | None:
    """The audit of a checkpoint with a malformed manifest, which is a finding and not bad input."""
    from xray_runtime.kernel.history.audit_check import Finding
    from xray_runtime.kernel.store.checkpoints import read_manifest
    from xray_runtime.kernel.store.manifest import MANIFEST
    from xray_runtime.trust.audit.checkpoints import Audit

    if not directory.is_dir() or not os.path.lexists(directory / MANIFEST):
        return None
    try:
        read_manifest(directory)
    except ValueError as error:
        return Audit(findings=[Finding(directory.name, "manifest-malformed", str(error))])
    return None
