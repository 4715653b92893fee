"""`xray promote`: the flow of `flows/promote.py`, with whoever started it as the one who is asked."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from xray.cli.lineage import BROKEN, Tracking, checked
from xray.deployments.local_ray import private_ray
from xray.deployments.local_services import prefect_server
from xray_runtime.config.evaluate import PromotionConfig
from xray_runtime.config.loading import load_config
from xray_runtime.config.validation import ConfigError
from xray_runtime.errors import root_cause
from xray_runtime.processes import kill_tagged, start_reaper

if TYPE_CHECKING:
    from xray.flows.promote import Approval

GATES = "promotion."


def promote(
    output: Annotated[Path, typer.Option("--output", help="Output directory of the lifecycle.")],
    name: Annotated[str, typer.Option("--name", help="Registered model.")],
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="The candidate, as in `xray lineage`. Default: NAME@candidate.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="Your name; it is recorded, not checked. Default: this user.")
    ] = None,
    note: Annotated[
        str | None,
        typer.Option("--note", help="Approve without being asked; the reason is recorded with the decision."),
    ] = None,
    gates: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="promotion.GATE=VALUE",
            help="Override the bound of a gate; `null` turns it off; repeatable.",
        ),
    ] = None,
    verdicts: Annotated[
        str | None,
        typer.Option(
            "--verdicts",
            metavar="REF",
            help="Human verdicts on candidate and champion, as `xray preferences` publishes them.",
        ),
    ] = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Make the previous champion the champion again.")
    ] = False,
    tracking_uri: Tracking = None,
) -> None:
    """Make a candidate champion: audit, comparison with the champion, gates, your approval, signed decision, aliases.

    Exit codes: 0 promoted, 1 refused by the audit, a gate or you, 2 bad input.
    """
    candidate = None if rollback else ref or f"{name}@candidate"
    checked(lambda: _check(output, candidate, note, gates or [], verdicts, tracking_uri))
    mark = start_reaper()
    try:
        with prefect_server(output.absolute()), private_ray():
            who = by or getpass.getuser()
            checked(lambda: _run(str(output), name, ref, who, note, gates, verdicts, rollback, tracking_uri))
    finally:
        kill_tagged(mark)


def _check(
    output: Path,
    candidate: str | None,
    note: str | None,
    gates: list[str],
    verdicts: str | None,
    tracking_uri: str | None,
) -> None:
    """Notice bad input before a server is started for it."""
    from xray_runtime.feedback.publication import JUDGEMENTS
    from xray_runtime.lineage.reference import open_lineage_store, resolve

    for entry in gates:
        if not entry.startswith(GATES):
            raise ConfigError(f"--set {entry!r} is not allowed: must be {GATES}GATE=VALUE")
    if note is None and not sys.stdin.isatty():
        raise ConfigError("--note: is required without a terminal, where no one can be asked")
    open_lineage_store(output, tracking_uri)
    _overrides(gates)
    if candidate is not None:
        resolve(candidate, output, tracking_uri)
    if verdicts is not None:
        _, node = resolve(verdicts, output, tracking_uri)
        if node.manifest.kind != JUDGEMENTS:
            raise ConfigError(f"--verdicts: {node.name} is not allowed: must be what `xray preferences` published")


def _overrides(gates: list[str]) -> PromotionConfig | None:
    """The gates that were set by hand, and no others."""
    return load_config(None, gates).promotion if gates else None


def _run(
    output: str,
    name: str,
    ref: str | None,
    by: str,
    note: str | None,
    gates: list[str] | None,
    verdicts: str | None,
    rollback: bool,
    tracking_uri: str | None,
) -> None:
    from xray.flows import promote as flows
    from xray_runtime.lineage.gates import NotPromoted

    promote = flows.promote_flow(lambda text: _ask(text, by, note))
    try:
        if rollback:
            note = note or typer.prompt("Why")
            done = flows.rollback(output, name, by, note, tracking_uri)
        else:
            done = promote(output, name, ref, _overrides(gates or []), tracking_uri, verdicts=verdicts)
    except NotPromoted as error:
        print("not promoted:")
        for reason in error.reasons:
            print(f"  {reason}")
        raise typer.Exit(BROKEN) from None
    except (ConfigError, OSError, typer.Abort):
        raise
    except Exception as error:
        cause = root_cause(error)
        text = f"failed: {type(cause).__name__}: {cause}; logs: {Path(output) / 'logs'}"
        Console(stderr=True).print(text, style="red", markup=False, soft_wrap=True, highlight=False)
        raise typer.Exit(BROKEN) from None
    if "gates_from" in done:
        print(f"the gates are {done['gates_from']}")
    for gate in done.get("gates", []):
        print(f"  {gate['name']}: {gate['reason']}")
    print(f"champion of {name}: version {done['version']} {done['checkpoint'][:12]}")


def _ask(text: str, by: str, note: str | None) -> Approval:
    from xray.flows.promote import Approval

    if note is not None:
        return Approval(approve=True, name=by, note=note)
    print(text)
    approve = typer.confirm("Make it champion?")
    return Approval(approve=approve, name=typer.prompt("Your name", default=by), note=typer.prompt("Why"))
