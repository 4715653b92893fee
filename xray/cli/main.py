"""The `xray` command."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console

from xray.cli import artifacts, chat, compare, fetch, keys, lineage, rollouts, tune, up
from xray.cli.errors import Commands
from xray.cli.job import BAD_INPUT, FAILED
from xray.cli.plan import plan
from xray.cli.promote import promote
from xray.cli.run import run
from xray.cli.serve import serve
from xray.deployments.local_services import quiet_environment
from xray.deployments.patience import NotUpError

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """X-ray: the whole life of an RLHF model as one auditable workflow."""


def automations() -> None:
    """Install automations on the Prefect server at PREFECT_API_URL: mark lost runs Crashed, notify people."""
    console = Console()
    if not os.environ.get("PREFECT_API_URL"):
        text = "PREFECT_API_URL: is not set: set it to the address of a Prefect server, as http://HOST:4200/api"
        Console(stderr=True).print(f"[red]error:[/red] {text}", soft_wrap=True, highlight=False)
        raise typer.Exit(BAD_INPUT)
    quiet_environment()
    from xray.deployments.automations import install

    console.print(
        "\n".join(f"installed: {name}" for name in install()) or "nothing to install: all are there already",
        highlight=False,
    )


# In the order in which help shows them.
app.command()(run)
app.command()(plan)
tune.register(app)
up.register(app)
lineage.register(app)
rollouts.register(app)
app.command()(chat.chat)
compare.register(app)
app.command()(promote)
app.command()(serve)
artifacts.register(app)
fetch.register(app)
app.add_typer(keys.app, name="keys")
app.command()(automations)


def main() -> None:
    """Entry point of the `xray` script."""
    try:
        sys.exit(app())
    except NotUpError as error:
        Console(stderr=True).print(f"failed: {error}", markup=False, soft_wrap=True, highlight=False)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
