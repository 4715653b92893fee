"""`xray prune`, `xray export` and `xray import`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from xray.cli.lineage import AsJson, Output, PublicKey, Ref, Root, Tracking, report


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for name, command in (("prune", prune), ("export", export), ("import", import_)):
        app.command(name)(command)


def prune(
    output: Root,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="REF", help="Also keep this checkpoint and its ancestors; repeatable."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them. Without it, only list what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints that no alias, no --keep and no evaluation needs; chains stay whole.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.lineage.reference import open_lineage_store, resolve_in
    from xray_runtime.lineage.render import printable
    from xray_runtime.lineage.retention import plan_prune, prune as run_prune

    place = open_lineage_store(output, None)
    plan = plan_prune(place, [resolve_in(ref, place) for ref in keep or []])
    if yes:
        run_prune(place, plan)
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

    place, node = resolve(ref, output, tracking_uri)
    count = run_export(place, node, bundle)
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

    uri = tracking_uri or f"sqlite:///{(output / 'mlflow.db').absolute()}"
    report(import_bundle(bundle, output, tracking_uri=uri, experiment=experiment, public=public_key), True, as_json)
