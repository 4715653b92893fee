"""The `xray` command."""

from __future__ import annotations

import os
import sys

import typer

from xray.cli import artifacts, chat, compare, fetch, keys, lineage, rollouts, tune, up
from xray.cli.errors import Commands
from xray.cli.plan import plan
from xray.cli.promote import promote
from xray.cli.run import run
from xray.cli.serve import serve
from xray_runtime.config.validation import ConfigError

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """X-ray: the whole life of an RLHF model as one auditable workflow."""


def automations() -> None:
    """Install automations on the Prefect server at PREFECT_API_URL: mark lost runs Crashed, notify people."""
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError("PREFECT_API_URL: is not set: set it to the address of a Prefect server")
    from xray.deployments.automations import install

    print("\n".join(f"installed: {name}" for name in install()) or "nothing to install: all are up to date")


# `xray --help` lists them in this order.
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
app.command()(fetch.fetch)
app.add_typer(keys.app, name="keys")
app.command()(automations)


def main() -> None:
    """Entry point of the `xray` script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
