"""`xray withdraw`: erase a person's data or a source, and block every descendant."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from xray.cli.exit_codes import FAILED
from xray.cli.options import AsJson, By, Root
from xray.tasks.output_directory import CONFIG, file_lock, require_no_run
from xray_runtime.kernel.config.validation import ConfigError

PANEL = "Checkpoints and keys"


def command(
    output: Root,
    user: Annotated[
        str | None, typer.Option(help="Person whose recorded data is erased, as the requests named them.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Source of data to erase: its name in a config, or its digest.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that no live model descends from what was withdrawn.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Erase it; by default only list what would be.")] = False,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Erase a person's recorded data or a source, and mark every model that was made from it.

    Copies elsewhere (bundles, a shared store, backups) are not reached.
    Exit codes: 0 done, 1 something is left, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import open_lineage_store
    from xray_runtime.live.withdrawal import plan_source, plan_user, verify as run_verify, withdraw as run_withdraw

    if [user is not None, source is not None, verify].count(True) != 1:
        raise ConfigError("--user, --source, --verify: exactly one is required")
    store = open_lineage_store(output, None)
    if verify:
        findings = run_verify(store)
        if as_json:
            print(json.dumps({"clean": not findings, "found": findings}, indent=2))
        else:
            print("\n".join(findings) or "no live model descends from what was withdrawn, and what was erased is gone")
        raise typer.Exit(FAILED if findings else 0)
    left: list[str] = []
    with file_lock(output / "locks", "withdraw.lock"):
        plan = plan_user(store, user) if user is not None else plan_source(store, source or "")
        if yes:
            require_no_run(output)
            left = run_withdraw(store, plan, by or getpass.getuser())
    if as_json:
        shas = {"holders": [n.sha256 for n in plan.holders], "models": [n.sha256 for n in plan.models]}
        files = [path.relative_to(output).as_posix() for path in plan.files]
        print(json.dumps(shas | {"files": files, "rerun": plan.rerun, "left": left, "done": yes}, indent=2))
        raise typer.Exit(FAILED if left else 0)
    for node in plan.holders:
        print(f"holds it      {node.name}")
    for node in plan.descendants:
        print(f"made from it  {node.name}{' (model)' if node in plan.models else ''}")
    print(f"{len(plan.files)} files {'lost' if yes else 'would lose'} it; {len(plan.models)} models are made from it")
    if yes and plan.models and any(node.manifest.kind == "feedback" for node in plan.holders):
        _schedule(output)
    elif plan.rerun:
        without = f"--set data.withdrawn={output}/withdrawn/texts.json" if user is not None else f"without {source}"
        config = output / CONFIG
        print(f"retrain: xray run {config if config.is_file() else 'CONFIG'} --output {output} {without}")
    for name in left:
        print(f"LEFT {name}", file=sys.stderr)
    if not yes:
        print("nothing was changed; --yes does it")
    raise typer.Exit(FAILED if left else 0)


def _schedule(output: Path) -> None:
    """Have a cycle without the data: it starts from the last policy that does not descend from it."""
    from xray.deployments.retraining import schedule_cycle

    name = schedule_cycle(output)
    print(f"scheduled: the flow run {name!r} trains again without it" if name else "the next cycle trains without it")
    print(f"retrain now: xray flywheel [CONFIG] --output {output}")
