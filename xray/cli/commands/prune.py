"""`xray prune`: remove checkpoints that nothing needs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from xray.cli.options import AsJson, Root

PANEL = "Checkpoints and keys"


def command(
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
    from xray_runtime.kernel.history.reference import open_lineage_store, resolve
    from xray_runtime.kernel.history.render import printable
    from xray_runtime.trust.retention import plan_prune, prune as run_prune

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
