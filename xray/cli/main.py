"""The `xray` command."""

from __future__ import annotations

import sys

import typer

from xray.cli.group import Commands

WIDTH = 120
"""Columns of `xray --help` in a wide terminal."""

app = typer.Typer(
    cls=Commands, add_completion=False, pretty_exceptions_enable=False, context_settings={"max_content_width": WIDTH}
)

FIRST = """X-ray: the whole life of an RLHF model as one auditable workflow.

  xray run configs/quickstart.yaml      train, evaluate and register a model; the same command resumes it
  xray studio --output DIR              show the result as pages: curves, rollouts, evaluations, lineage
  xray plan CONFIG                      say before a run where models go and what memory they need
  xray promote --output DIR             make the candidate the champion, if every gate passes
  xray serve --output DIR               serve the champion, OpenAI-compatible

xray --help lists all commands; xray COMMAND --help explains one. Start: docs/first-hour.md, tables: docs/glance.md."""
"""The text that `xray` alone prints."""


@app.callback(invoke_without_command=True)
def _root(ctx: typer.Context) -> None:
    """X-ray: the whole life of an RLHF model as one auditable workflow."""
    if ctx.invoked_subcommand is None:
        typer.echo(FIRST)


def main() -> None:
    sys.exit(app())


if __name__ == "__main__":
    main()
