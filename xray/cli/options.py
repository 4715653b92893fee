"""The arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Ref = Annotated[
    str, typer.Argument(metavar="REF", help="Checkpoint directory, sha256, stage, or registered NAME@ALIAS.")
]
Root = Annotated[Path, typer.Option(help="Output directory of lifecycles.")]
Output = Annotated[Path | None, typer.Option(help="Output directory of the lifecycle that has REF.")]
PublicKey = Annotated[Path | None, typer.Option(help="Public key to trust. Default: the one beside the records.")]
By = Annotated[str | None, typer.Option(help="Your name; it is recorded, not checked. Default: this user.")]
Tracking = Annotated[str | None, typer.Option(help="MLflow's address. Default: the output directory's own store.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Target = Annotated[
    str, typer.Argument(metavar="CONFIG|MODULE:FLOW", help="YAML file of a lifecycle, or a flow of your own.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field, or the flow's parameter; repeatable."),
]
