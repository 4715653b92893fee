"""`xray replay`: whether a stage gives the same bytes again."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from xray.cli.errors import root_cause_only
from xray.cli.exit_codes import FAILED
from xray.cli.options import AsJson, Output, Ref, Tracking
from xray.deployments.local_ray import running_ray
from xray.flows.subject import import_modules
from xray_runtime.kernel.processes import kill_tagged, start_reaper

if TYPE_CHECKING:
    from xray_runtime.trust.replay import Replay, Replayable

PANEL = "Evidence"


def command(
    ref: Ref,
    iteration: Annotated[
        int | None,
        typer.Option(min=0, help="Last iteration of PPO to recompute, counted from 0. Default: the whole stage."),
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Module that registers a stage kind of your own; repeatable."),
    ] = None,
    output: Output = None,
    tracking_uri: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Recompute a stage from its inputs, of PPO up to an iteration, and compare every byte.

    Rollouts are compared with the ledger, weights with the digests in it, and at the end of the stage every file with
    the checkpoint's. Exit codes: 0 the same, 1 different (the first difference is named) or failed, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import resolve
    from xray_runtime.trust.replay import replayable

    import_modules(modules or [])
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    store, node = resolve(ref, output, tracking_uri)
    stage = replayable(node, store.graph, iteration)
    tag = start_reaper()
    try:
        with tempfile.TemporaryDirectory(prefix="replay-", dir=store.output) as scratch:
            changes = _changes(stage, Path(scratch))
            for change in changes:
                console.print(Text(f"changed since then: {change}"))
            with running_ray():
                result = _run(stage, iteration, Path(scratch), console)
    finally:
        kill_tagged(tag)
    if as_json:
        print(json.dumps(result.to_json() | {"changes": changes}, indent=2))
    else:
        for line in _summary(result):
            console.print(Text(line))
    raise typer.Exit(0 if result.is_same else FAILED)


def _changes(stage: Replayable, scratch: Path) -> list[str]:
    """Code and libraries that changed since the policy was trained."""
    from xray.cli.explain import differences
    from xray_runtime.kernel.store.digest_memory import DigestMemory

    try:
        now = stage.identity(DigestMemory(scratch / "digests.sqlite"))
    except ValueError as error:  # an agent that is gone, which a replay does not need
        return [str(error)]
    return differences(stage.node.manifest.identity, now)


def _run(stage: Replayable, iteration: int | None, scratch: Path, console: Console) -> Replay:
    from xray_runtime.cluster.opening import model_opener
    from xray_runtime.cluster.pictures import picture_folders
    from xray_runtime.trust.replay import replay as run_replay

    logs = scratch / "logs" / stage.node.manifest.stage
    pictures = picture_folders(stage.kind.inputs_at(stage.paths))
    opener = model_opener(stage.runtime, logs, f"replay-{stage.node.sha256[:12]}", pictures)
    # In a run, warnings of libraries go to the stage's log.
    warnings.simplefilter("ignore")

    def show(done: int, total: int, unit: str, note: str) -> None:
        console.print(Text(f"{done} of {total} {unit} {note}".rstrip(), style="dim"))

    with root_cause_only():
        return run_replay(stage, iteration, opener, scratch, show)


def _summary(result: Replay) -> list[str]:
    notes = (
        [f"scores of servers were read from the ledger, not requested again: {', '.join(result.taken)}"]
        if result.taken
        else []
    )
    if result.difference is None:
        weights = f"; weights {result.weights[:12]}" if result.weights else ""
        parts = [f"{result.files} files of the checkpoint"] if result.files else []
        if result.compared:
            parts.append(f"rollouts of {len(result.compared)} iterations, to iteration {max(result.compared)}")
        return [*notes, f"the same bytes: {', '.join(parts)}{weights}"]
    lines = [*notes, f"DIFFERENT: {result.difference}"]
    if result.changed_since:
        lines.append("Recomputing gives the published bytes: the file was changed afterwards (see `xray audit`).")
    return lines
