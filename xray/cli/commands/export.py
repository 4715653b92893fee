"""`xray export`: a checkpoint and what it was made from, as one archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xray.cli.options import Output, Ref, Tracking

PANEL = "Checkpoints and keys"


def command(
    ref: Ref,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The .tar archive to write.")],
    output: Output = None,
    tracking_uri: Tracking = None,
) -> None:
    """Write a checkpoint, its ancestors, their records and the public key to one archive.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import resolve
    from xray_runtime.trust.bundle import export as run_export

    store, node = resolve(ref, output, tracking_uri)
    count = run_export(store, node, bundle)
    print(f"{bundle}: {count} checkpoints; `xray audit {bundle}` checks it")
