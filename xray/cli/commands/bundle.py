"""`xray bundle`: one iteration of a PPO stage with all that a replay of it needs, as one archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from xray.cli.exit_codes import FAILED
from xray.cli.options import Output, Ref, Tracking
from xray.cli.replaying import Modules, changes, identity_now, opened, scratch_directory, show_changes, summary
from xray.flows.subject import import_modules

PANEL = "Evidence"


def command(
    ref: Ref,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The .tar archive to write.")],
    iteration: Annotated[int, typer.Option(min=0, help="Iteration of PPO, counted from 0.")],
    sample: Annotated[
        int | None,
        typer.Option(min=0, metavar="ROW", help="Row of a reply: add a page with its path to its gradient."),
    ] = None,
    modules: Modules = None,
    output: Output = None,
    tracking_uri: Tracking = None,
) -> None:
    """Recompute a PPO stage up to an iteration, and pack what a replay of that iteration alone needs.

    `xray replay BUNDLE` recomputes it on any machine. Exit codes: 0 done, 1 the stage comes out different, or failed, 2
    bad input.
    """
    from xray_runtime.kernel.history.reference import resolve
    from xray_runtime.trust.iteration.pack import check_bundle, pack
    from xray_runtime.trust.replayable import replayable

    import_modules(modules or [])
    console = Console(highlight=False, soft_wrap=True)
    store, node = resolve(ref, output, tracking_uri)
    stage = replayable(node, store.graph, iteration)
    check_bundle(store, stage, iteration, bundle, sample)
    with scratch_directory(store.output) as scratch:
        show_changes(console, changes(stage, identity_now(stage, scratch)))
        with opened(stage, scratch, console) as (open_models, show):
            result = pack(store, stage, iteration, bundle, open_models, scratch, show, sample)
    if not result.is_same:
        for line in summary(result):
            console.print(Text(line))
        console.print(Text("nothing was written: the iteration does not come out as the ledger has it"))
        raise typer.Exit(FAILED)
    size = f"{bundle.stat().st_size / 1e6:,.1f} MB"
    console.print(
        Text(f"{bundle}: iteration {iteration} of {node.name}, {size}; `xray replay {bundle}` computes it again")
    )
