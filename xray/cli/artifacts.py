"""`xray prune`, `xray export`, `xray import` and `xray fetch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from xray.cli.job import FAILED
from xray.cli.lineage import report
from xray.cli.options import AsJson, Output, PublicKey, Ref, Root, Tracking
from xray.tasks.output_directory import saved_config
from xray_runtime.config.validation import ConfigError
from xray_runtime.credentials import has_login, strip_credentials

PATIENCE_S = 20.0
"""Timeout of `fetch` for the shared store."""


def prune(
    output: Root,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="REF", help="Also keep this checkpoint and its ancestors; repeatable.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them. Without it, only list what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints that no alias, no --keep and no evaluation needs; chains stay whole.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.lineage.reference import open_lineage_store, resolve
    from xray_runtime.lineage.render import printable
    from xray_runtime.lineage.retention import plan_prune, prune as run_prune

    store = open_lineage_store(output, None)
    plan = plan_prune(store, [resolve(ref, output, None)[1] for ref in keep or []])
    if yes:
        run_prune(store, plan)
    if as_json:
        names = {"remove": [n.sha256 for n in plan.remove], "keep": [n.sha256 for n in plan.keep]}
        print(json.dumps(names | {"bytes": plan.bytes, "removed": yes}, indent=2))
        return
    for node in plan.remove:
        print(f"{'removed' if yes else 'would remove'}  {printable(node.name)}")
    hint = "" if yes or not plan.remove else "; --yes removes them"
    print(f"{len(plan.remove)} of {len(plan.remove) + len(plan.keep)} checkpoints, {plan.bytes / 1e6:,.1f} MB{hint}")


def export(
    ref: Ref,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The .tar archive to write.")],
    output: Output = None,
    tracking_uri: Tracking = None,
) -> None:
    """Write a checkpoint, its ancestors, their records and the public key to one archive.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.lineage.bundle import export as run_export
    from xray_runtime.lineage.reference import resolve

    store, node = resolve(ref, output, tracking_uri)
    count = run_export(store, node, bundle)
    print(f"{bundle}: {count} checkpoints; `xray audit {bundle}` checks it")


def import_(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Archive that `xray export` wrote.")],
    output: Annotated[Path, typer.Option(help="Output directory to import into.")],
    experiment: Annotated[str, typer.Option(help="MLflow experiment to record it in.")] = "imported",
    public_key: PublicKey = None,
    tracking_uri: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Import a bundle into an output directory and its MLflow, if its audit is sound.

    Exit codes: 0 done, 1 the audit found something and nothing was imported, 2 bad input.
    """
    from xray_runtime.lineage.bundle import import_bundle
    from xray_runtime.tracking.registry import own_store

    uri = tracking_uri or own_store(output)
    report(import_bundle(bundle, output, tracking_uri=uri, experiment=experiment, public=public_key), True, as_json)


def fetch(
    output: Annotated[Path, typer.Option(help="Output directory to import into.")],
    storage: Annotated[
        str | None, typer.Option(help="URL of the shared store. Default: the one of the directory's last run.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every checkpoint in the store, not only those lifecycle.json names.")
    ] = False,
) -> None:
    """Fetch missing or damaged checkpoints from the shared store, if a key that is trusted here signed them.

    Exit codes: 0 all are present and sound, 1 the store lacks some, 2 bad input.
    """
    from xray_runtime.evidence.log import LIFECYCLE
    from xray_runtime.lineage.attestation import open_store
    from xray_runtime.lineage.keys import exchange_keys
    from xray_runtime.lineage.log import log_checkpoints
    from xray_runtime.lineage.signing import signing_key
    from xray_runtime.store.checkpoints import CHECKPOINTS, verify
    from xray_runtime.store.identity import file_sha256
    from xray_runtime.store.manifest import MANIFEST
    from xray_runtime.store.shared import SharedStore, StorageError, is_safe

    if storage is not None and has_login(storage):
        raise ConfigError(
            f"--storage: a login in {strip_credentials(storage)!r} is not allowed: credentials come from the "
            "environment"
        )
    output = output.absolute()
    url = storage or saved_config(output).runtime.storage
    if url is None:
        raise ConfigError("--storage: is not set, and the directory's config.yaml names no store; give its URL")
    try:
        shared = SharedStore(url, PATIENCE_S)
        names = shared.names(CHECKPOINTS) if everything else _recorded(output)
        output.mkdir(parents=True, exist_ok=True)
        key = signing_key(output)
        exchange_keys(output, shared)
        store, missing = open_store(output, shared), []
        for name in names:
            if "/" in name or not is_safe(name):
                raise ConfigError(f"--output: {name[:80]!a} in its {LIFECYCLE} is not allowed: is no checkpoint's name")
            directory = store.root / name
            # Every byte is read: the memory of digests does not see bits that rot.
            sound = not verify(directory) and store.is_sound(directory)
            fetched = not sound and store.fetch(directory)
            if not sound and not fetched:
                missing.append(name)
            if fetched:
                log_checkpoints(output, key, {name: file_sha256(directory / MANIFEST)}, here=False)
            print(f"{'present' if sound else 'fetched' if fetched else 'missing'}  {name}")
    except StorageError as error:
        raise ConfigError(f"--storage: {error}") from None
    raise typer.Exit(FAILED if missing else 0)


def _recorded(output: Path) -> list[str]:
    """Names of the checkpoint directories in lifecycle.json."""
    from xray_runtime.evidence.log import LIFECYCLE

    path = output / LIFECYCLE
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        return [f"{stage['name']}-{stage['key'][:12]}" for stage in stages]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--output: there is no {LIFECYCLE} in {str(output)!r} to list checkpoints; use --all"
        ) from None
