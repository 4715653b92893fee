"""`xray import`: the checkpoints of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xray.cli.auditing import report
from xray.cli.options import AsJson, PublicKey, Tracking

PANEL = "Checkpoints and keys"


def command(
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
    from xray_runtime.kernel.tracking.registry import own_store
    from xray_runtime.trust.bundle import import_bundle

    uri = tracking_uri or own_store(output)
    report(import_bundle(bundle, output, tracking_uri=uri, experiment=experiment, public=public_key), True, as_json)
