"""The `xray` command."""

from __future__ import annotations

import sys

import typer

from xray.cli.group import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """X-ray: the whole life of an RLHF model as one auditable workflow."""
    from xray_runtime.kernel.processes import tighten_umask

    tighten_umask()


def main() -> None:
    sys.exit(app())


if __name__ == "__main__":
    main()
