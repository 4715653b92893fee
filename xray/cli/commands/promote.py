"""`xray promote`: the flow of `flows/promote.py`, with the approval at this terminal."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xray.cli.errors import root_cause_only
from xray.cli.exit_codes import FAILED
from xray.cli.options import By, Root, Tracking
from xray.deployments.local_ray import private_ray
from xray.deployments.local_services import prefect_server
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.processes import kill_tagged, start_reaper
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.methods.loading import load_config

if TYPE_CHECKING:
    from xray.flows.promote import ApprovalInput

PANEL = "Champion"
GATES = "promotion."


def command(
    output: Root,
    name: Annotated[str, typer.Option(help="Registered model.")],
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="The candidate, as in `xray lineage`. Default: NAME@candidate.")
    ] = None,
    by: By = None,
    note: Annotated[
        str | None, typer.Option(help="Approve without a prompt; the note is recorded with the decision.")
    ] = None,
    gates: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="promotion.GATE=VALUE", help="Override a gate's bound; `null` turns it off."),
    ] = None,
    verdicts: Annotated[
        str | None,
        typer.Option(
            metavar="REF", help="Human verdicts on candidate and champion, as published by `xray preferences`."
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
    bounds = _check(output, candidate, note, gates or [], verdicts, tracking_uri)
    tag = start_reaper()
    try:
        logs = f"; logs: {output / 'logs'}"
        with prefect_server(output.absolute()), private_ray(), root_cause_only(logs):
            from xray.flows import promote as flows
            from xray_runtime.trust.gates import NotPromoted

            who = by or getpass.getuser()
            try:
                if rollback:
                    done = flows.rollback(str(output), name, who, note or typer.prompt("Why"), tracking_uri)
                else:
                    promote_here = flows.promote_flow(lambda text: _ask(text, who, note))
                    done = promote_here(str(output), name, ref, bounds, tracking_uri, verdicts=verdicts)
            except NotPromoted as error:
                print("\n  ".join(["not promoted:", *error.reasons]))
                raise typer.Exit(FAILED) from None
    finally:
        kill_tagged(tag)
    if "gates_from" in done:
        print(f"the gates are {done['gates_from']}")
    for gate in done.get("gates", []):
        print(f"  {gate['name']}: {gate['reason']}")
    print(f"champion of {name}: version {done['version']} {done['checkpoint'][:12]}")


def _check(
    output: Path,
    candidate: str | None,
    note: str | None,
    gates: list[str],
    verdicts: str | None,
    tracking_uri: str | None,
) -> PromotionConfig | None:
    """Check the input before starting servers; returns the bounds from --set."""
    from xray_runtime.kernel.history.reference import open_lineage_store, resolve
    from xray_runtime.live.feedback.publication import JUDGEMENTS
    from xray_runtime.trust.gates import changed_by_hand

    for entry in gates:
        if not entry.startswith(GATES):
            raise ConfigError(f"--set {entry!r} is not allowed: must be {GATES}GATE=VALUE")
    if note is None and not sys.stdin.isatty():
        raise ConfigError("--note: is required without a terminal")
    open_lineage_store(output, tracking_uri)
    bounds = load_config(None, gates).promotion if gates else None
    changed_by_hand(bounds)
    if candidate is not None:
        resolve(candidate, output, tracking_uri)
    if verdicts is not None:
        _, node = resolve(verdicts, output, tracking_uri)
        if node.manifest.kind != JUDGEMENTS:
            raise ConfigError(f"--verdicts: {node.name} is not allowed: must be a dataset of `xray preferences`")
    return bounds


def _ask(text: str, by: str, note: str | None) -> ApprovalInput:
    from xray.flows.promote import ApprovalInput

    if note is not None:
        return ApprovalInput(approve=True, name=by, note=note)
    print(text)
    approve = typer.confirm("Make it champion?")
    return ApprovalInput(approve=approve, name=typer.prompt("Your name", default=by), note=typer.prompt("Why"))
