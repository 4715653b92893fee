"""`xray doctor`: what is wrong with this installation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from xray.cli.exit_codes import FAILED
from xray.cli.options import AsJson
from xray.cli.server_commands import Where
from xray.deployments.server_home import find_server_home
from xray_runtime.kernel.terminal import print_indented

PANEL = "Servers"


def command(
    output: Annotated[Path | None, typer.Option(help="Also look at this output directory.")] = None,
    home: Where = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with this installation: Python, disk, memory, libraries, GPU, ports, servers, results.

    Exit codes: 0 healthy, 1 something is wrong, 2 bad input.
    """
    from xray.deployments.doctor import diagnose

    diagnoses = diagnose(find_server_home(home), output)
    if as_json:
        print(json.dumps([{"name": name, "problems": problems} for name, problems in diagnoses.items()], indent=2))
    else:
        console = Console()
        for name, problems in diagnoses.items():
            for problem in problems or ("ok",):
                print_indented(console, f"{name:10}", problem)
    raise typer.Exit(FAILED if any(diagnoses.values()) else 0)
