"""`xray approve`: a person's approval of a candidate, signed with a key of their own."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated

import typer

from xray.cli.options import By, Ref, Root, Tracking

PANEL = "Champion"


def command(
    ref: Ref,
    output: Root,
    name: Annotated[str, typer.Option(help="Registered model.")],
    key: Annotated[
        Path,
        typer.Option(metavar="KEY", help="Your private key, or its public half if an SSH agent has it."),
    ],
    note: Annotated[str, typer.Option(help="Your reason; it is signed.")],
    by: By = None,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Withdraw what you approved with this key.")] = False,
    tracking_uri: Tracking = None,
) -> None:
    """Approve a candidate, where `promotion.approvals` asks for several people, or withdraw an approval.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.config.validation import ConfigError
    from xray_runtime.kernel.evidence.log import view
    from xray_runtime.kernel.history.reference import resolve
    from xray_runtime.trust.approvals import approve

    _, node = resolve(ref, output, tracking_uri)
    if (name, node.sha256) not in {(one.name, one.checkpoint) for one in view(output).decisions}:
        raise ConfigError(f"--name: {name!r} has no version with checkpoint {node.sha256[:12]}")
    who = by or getpass.getuser()
    digest = approve(output, name=name, checkpoint=node.sha256, key=key, by=who, note=note, withdrawn=withdraw)
    done = "no longer approves" if withdraw else "approved"
    print(f"{who} {done} {node.name} as champion of {name}; key {digest}")
