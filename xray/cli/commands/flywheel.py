"""`xray flywheel`: one cycle of the flow in `flows/flywheel.py`, under the supervisor."""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from xray.cli.options import Root
from xray.cli.supervisor import supervise
from xray.flows.subject import Subject
from xray.tasks.output_directory import saved_config
from xray.tasks.preflight import check_ray_address
from xray_runtime.kernel.config.loading import parse_overrides, read_mapping
from xray_runtime.kernel.config.paths import put
from xray_runtime.kernel.config.validation import validate_as
from xray_runtime.live.flywheel import FlywheelConfig

PANEL = "Champion"
FLOW = "xray.flows.flywheel:flywheel"


def command(
    output: Root,
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file with fields of a FlywheelConfig.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set a field; repeatable.")
    ] = None,
    release: Annotated[
        str | None, typer.Option(metavar="NOTE", help="Release the last cycle, which is held; the note is recorded.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the cycle's record to stdout, all else to stderr.")
    ] = False,
) -> None:
    """Make a candidate from the feedback since the last cycle: curate, train, compare with the champion, check gates.

    With `canary.share=0.1` the candidate then answers that share of the requests to `xray serve --record`; run the
    command again to learn how that ended, and to begin a cycle after it.
    Run the same command again to continue a cycle that was interrupted. `xray promote` makes the candidate champion.
    Exit codes: 0 done, 1 a stage failed, 2 bad input, 130 interrupted.
    """
    from xray.flows.cycles import CANARY, cycle_directory, cycle_markdown, read_cycles
    from xray.flows.flywheel import begin_cycle

    data = read_mapping(config) if config is not None else {}
    for field, value in parse_overrides(overrides or []).items():
        put(data, field, value, f"--set {field}")
    wanted = validate_as(FlywheelConfig, data)
    check_ray_address()
    # Bad input is reported before a server starts; the flow continues this cycle.
    cycle = begin_cycle(output.absolute(), wanted, release is not None)
    console = Console(stderr=True, highlight=False)
    if cycle is None:
        console.print("nothing was recorded since the last cycle")
        return
    if cycle.state == CANARY:
        console.print(f"cycle {cycle.number}: its canary runs; see `xray status`")
        return
    parameters: dict[str, Any] = {"output": str(output.absolute()), "config": wanted.model_dump(mode="json")}
    if release is not None:
        parameters["release"] = f"{getpass.getuser()}: {release}"
    subject, runtime = Subject(flow=FLOW, parameters=parameters), saved_config(output).runtime
    code = supervise(output.absolute(), subject, runtime, console, to_stderr=as_json)
    if code == 0:
        done = next(each for each in read_cycles(output.absolute()) if each.number == cycle.number)
        if as_json:
            print(json.dumps(done.model_dump(mode="json"), indent=2))
        else:
            print(cycle_markdown(done))
            print(f"records: {cycle_directory(output, done)}")
    raise typer.Exit(code)
