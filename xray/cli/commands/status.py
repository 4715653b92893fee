"""`xray status`: the servers of `xray up`, and the runs on them."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from xray.cli.exit_codes import FAILED
from xray.cli.options import AsJson
from xray.cli.server_commands import Where
from xray.deployments.server_home import find_server_home
from xray.deployments.status import service_status, show

PANEL = "Servers"


def command(home: Where = None, as_json: AsJson = False) -> None:
    """Show which servers are up, which runs are running, suspended, waiting or next, and the champions.

    Exit codes: 0 everything is up, 1 something is not, 2 bad input.
    """
    server_home = find_server_home(home)
    content = service_status(server_home, server_home.load())
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        show(Console(), content)
    raise typer.Exit(0 if content["up"] else FAILED)
