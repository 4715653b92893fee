"""`xray rollouts` and `xray replay`: the rollouts of a policy, and whether a stage is reproducible."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from xray.cli.errors import root_cause_only
from xray.cli.job import FAILED
from xray.cli.options import AsJson, Output, Ref, Tracking
from xray.deployments.local_ray import running_ray
from xray.flows.subject import import_modules
from xray_runtime.config.validation import ConfigError
from xray_runtime.processes import kill_tagged, start_reaper
from xray_runtime.terminal import print_indented

if TYPE_CHECKING:
    from xray_runtime.lineage.graph import Node
    from xray_runtime.lineage.replay import Replay, Replayable


def rollouts(
    ref: Ref,
    output: Output = None,
    iteration: Annotated[list[int] | None, typer.Option(min=0, help="Only this iteration; repeatable.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Only rows this reward source applies to; bounds and --failed then concern it.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Lowest reward, as scored.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Highest reward, as scored.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only rows for which a source failed.")] = False,
    unused: Annotated[bool, typer.Option("--unused", help="Only rows that no update used.")] = False,
    order: Annotated[
        str, typer.Option(help="row, or highest or lowest: by the reward, or the score of --source.")
    ] = "row",
    against: Annotated[
        int | None, typer.Option(min=0, help="Compare --iteration with this one: rewards, and prompts of both.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of rows shown; 0: all.")] = 20,
    tracking_uri: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Show the rollouts that a policy learned from: prompt, reply, scores, advantage, and whether it was used.

    Exit codes: 0 done, 1 a file of the ledger was changed, 2 bad input.
    """
    from xray_runtime.data.ledger import Query
    from xray_runtime.lineage.reference import resolve
    from xray_runtime.lineage.rollouts import Selection, checked_order

    by = checked_order(order)
    _, node = resolve(ref, output, tracking_uri)
    if against is not None:
        if iteration is None or len(iteration) != 1:
            raise ConfigError("--against: needs exactly one --iteration")
        _print_diff(node, iteration[0], against, limit or None, as_json)
        return
    query = Query(sorted(set(iteration or [])), source, min_reward, max_reward, failed, unused)
    found = Selection(node, query, by).page(0, limit or None)
    if as_json:
        print(json.dumps(vars(found), indent=2))
    else:
        _print_rows(Console(), found.rows)
        print(f"{len(found.rows)} of {found.total} rows" + ("" if len(found.rows) == found.total else "; --limit"))
    for name in found.changed:
        print(f"BROKEN {name} was changed after it was published: see `xray audit`", file=sys.stderr)
    raise typer.Exit(FAILED if found.changed else 0)


def _print_diff(node: Node, first: int, second: int, limit: int | None, as_json: bool) -> None:
    """Print two iterations beside each other."""
    from xray.cli.chat import shown
    from xray_runtime.lineage.rollouts import diff_iterations

    found, console = diff_iterations(node, first, second, limit), Console()
    if as_json:
        print(json.dumps(vars(found), indent=2))
        return
    for one in found.summary:
        numbers = ", ".join(f"{name} {_number(one[name])}" for name in ("mean", "lowest", "highest"))
        print(f"iteration {one['iteration']}: {one['rows']} rows, reward {numbers}")
    for before, after in found.pairs:
        print_indented(console, "", f"prompt {before['prompt_row']}", "bold")
        print_indented(console, "  prompt  ", shown(before["prompt"]))
        for row in (before, after):
            reward = "none" if row["reward"] is None else _number(row["reward"])
            print_indented(console, f"  {row['iteration']:<8}", f"{reward} {shown(row['reply'])}")
    print(f"{len(found.pairs)} of {found.total} prompts that are in both")


def _print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    from xray.cli.chat import shown

    for row in rows:
        numbers = [f"{name} {_number(row[name])}" for name in ("reward", "advantage") if row[name] is not None]
        used = "used" if row["used"] == "yes" else f"not used{row['used'].removeprefix('no')}"
        title = ", ".join([f"iteration {row['iteration']}, row {row['row']}: {used}", *numbers])
        print_indented(console, "", title, "bold")
        scores = [f"{source} {_number(score)}" for source, score in row["scores"].items() if score is not None]
        scores += [f"gold {_number(row['gold'])}"] if row["gold"] is not None else []
        if scores:
            print_indented(console, "  scores  ", ", ".join(scores))
        for source, why in row["failures"].items():
            print_indented(console, "  failed  ", shown(f"{source}: {why}"))
        for column, title in (("prompt", "prompt"), ("reasoning", "thinks"), ("reply", "reply")):
            if column in row:
                print_indented(console, f"  {title:8}", shown(row[column]))
        console.print()


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:+.3f}"


def replay(
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
    from xray_runtime.lineage.reference import resolve
    from xray_runtime.lineage.replay import replayable

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
    from xray_runtime.store.digest_memory import DigestMemory

    try:
        now = stage.identity(DigestMemory(scratch / "digests.sqlite"))
    except ValueError as error:  # an agent that is gone, which a replay does not need
        return [str(error)]
    return differences(stage.node.manifest.identity, now)


def _run(stage: Replayable, iteration: int | None, scratch: Path, console: Console) -> Replay:
    from xray_runtime.lineage.replay import replay as run_replay
    from xray_runtime.workers.opening import model_opener

    logs = scratch / "logs" / stage.node.manifest.stage
    opener = model_opener(stage.runtime, logs, f"replay-{stage.node.sha256[:12]}")
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
