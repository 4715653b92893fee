"""`xray rollouts`: the rollouts that a policy learned from."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from xray.cli.conversation import shown
from xray.cli.exit_codes import FAILED
from xray.cli.options import AsJson, Output, Ref, Tracking
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.terminal import print_indented

if TYPE_CHECKING:
    from xray_runtime.kernel.history.graph import Node

PANEL = "Evidence"


def command(
    ref: Ref,
    output: Output = None,
    iteration: Annotated[list[int] | None, typer.Option(min=0, help="Only this iteration; repeatable.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Only rows this reward source applies to; bounds and --failed then refer to it.")
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
    from xray_runtime.kernel.history.reference import resolve
    from xray_runtime.trust.rollouts import Selection, checked_order

    by = checked_order(order)
    _, node = resolve(ref, output, tracking_uri)
    if against is not None:
        if iteration is None or len(iteration) != 1:
            raise ConfigError("--against: needs exactly one --iteration")
        _print_diff(node, iteration[0], against, limit or None, as_json)
        return
    query = Query(sorted(set(iteration or [])), source, min_reward, max_reward, failed, unused)
    page = Selection(node, query, by).page(0, limit or None)
    if as_json:
        print(json.dumps(vars(page), indent=2))
    else:
        _print_rows(Console(), page.rows)
        print(f"{len(page.rows)} of {page.total} rows" + ("" if len(page.rows) == page.total else "; --limit"))
    for name in page.changed:
        print(f"BROKEN {name} was changed after it was published: see `xray audit`", file=sys.stderr)
    raise typer.Exit(FAILED if page.changed else 0)


def _print_diff(node: Node, first: int, second: int, limit: int | None, as_json: bool) -> None:
    """Print two iterations beside each other."""
    from xray_runtime.trust.rollouts import diff_iterations

    difference, console = diff_iterations(node, first, second, limit), Console()
    if as_json:
        print(json.dumps(vars(difference), indent=2))
        return
    for one in difference.summary:
        numbers = ", ".join(f"{name} {_number(one[name])}" for name in ("mean", "lowest", "highest"))
        print(f"iteration {one['iteration']}: {one['rows']} rows, reward {numbers}")
    for before, after in difference.pairs:
        print_indented(console, "", f"prompt {before['prompt_row']}", "bold")
        print_indented(console, "  prompt  ", shown(before["prompt"]))
        for row in (before, after):
            reward = "none" if row["reward"] is None else _number(row["reward"])
            print_indented(console, f"  {row['iteration']:<8}", f"{reward} {shown(row['reply'])}")
    print(f"{len(difference.pairs)} of {difference.total} prompts that are in both")


def _print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
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
        for column, title in (("drawn", "drawn"), ("prompt", "prompt"), ("reasoning", "thinks"), ("reply", "reply")):
            if column in row:
                print_indented(console, f"  {title:8}", shown(row[column]))
        console.print()


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:+.3f}"
