"""The `xray` command."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from xray.cli import artifacts, chat, compare, keys, lineage, rollouts, tune, up
from xray.cli.errors import Commands
from xray.cli.flywheel import flywheel
from xray.cli.plan import plan
from xray.cli.promote import promote
from xray.cli.recorded import recorded
from xray.cli.reviews import reviews
from xray.cli.run import run
from xray.cli.serve import serve
from xray.cli.studio import studio
from xray.cli.withdraw import withdraw
from xray_runtime.config.validation import ConfigError
from xray_runtime.processes import tighten_umask

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """X-ray: the whole life of an RLHF model as one auditable workflow."""
    tighten_umask()


def automations() -> None:
    """Install automations on the Prefect server at PREFECT_API_URL: mark lost runs Crashed, notify people."""
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError("PREFECT_API_URL: is not set; set it to the address of a Prefect server")
    from xray.deployments.automations import install

    print("\n".join(f"installed: {name}" for name in install()) or "nothing to install: all are up to date")


COMMANDS: tuple[Any, ...] = (
    *(run, plan, tune.tune, up.up, up.down, up.status, up.doctor),
    *(lineage.lineage, lineage.diff, lineage.audit, rollouts.rollouts, rollouts.replay),
    *(chat.chat, compare.compare, compare.preferences, promote, serve, recorded, reviews, flywheel, studio, withdraw),
    *(artifacts.prune, artifacts.export, artifacts.import_, artifacts.fetch),
)
"""Commands, in the order of `xray --help`."""
for command in COMMANDS:
    app.command(command.__name__.rstrip("_"))(command)
app.add_typer(keys.app, name="keys")
app.command()(automations)


def main() -> None:
    sys.exit(app())


if __name__ == "__main__":
    main()
