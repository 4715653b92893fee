"""The commands of `xray`, each imported when it is called; the listing reads their names and help without an import."""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from xray.cli.errors import print_error, report_error
from xray.cli.exit_codes import BAD_INPUT
from xray_runtime.kernel.plugs import Registry

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

Plug: TypeAlias = typer.Typer | Callable[..., None]
ATTRIBUTE = "command"
COMMANDS = Registry[Plug]("command", "xray.cli.commands", ATTRIBUTE, "xray.commands")
PANELS = ("Run", "Evidence", "People", "Champion", "Checkpoints and keys", "Servers")
"""Panels of `xray --help`, in their order; others follow."""
OTHERS = "Commands of other packages"


class Commands(TyperGroup):
    """Commands whose errors are one line each, with Prefect's, Ray's and MLflow's chatter switched off."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        try:
            self.commands = {_shown(name): TyperCommand(_shown(name)) for name in COMMANDS}
        except ValueError as error:
            print_error("error", str(error))
            raise SystemExit(BAD_INPUT) from None

    def list_commands(self, ctx: Context) -> list[str]:
        """The names, panel by panel."""
        places = {panel: number for number, panel in enumerate(PANELS)}
        panels = {name: described(name).rich_help_panel or "" for name in self.commands}
        return sorted(self.commands, key=lambda name: (places.get(panels[name], len(places)), panels[name], name))

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        """The commands by panel. As plain text: Typer's own way imports Rich, which takes longer than all else."""
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(self.help or "")
        commands = [described(name) for name in self.list_commands(ctx)]
        for panel, listed in groupby(commands, lambda command: command.rich_help_panel or ""):
            with formatter.section(panel):
                formatter.write_dl([(c.name or "", (c.help or "").split("\n\n")[0]) for c in listed])
        formatter.write_paragraph()
        formatter.write_text("xray COMMAND --help explains a command.")

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """The name and the help of a command."""
        return described(cmd_name) if cmd_name in self.commands else None

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """The command that is called, imported."""
        from xray.deployments.quiet import quiet_environment
        from xray_runtime.kernel.processes import tighten_umask, without_collection

        tighten_umask()
        quiet_environment()
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            with without_collection():
                command = load(name)
            gc.freeze()
        return name, command, rest

    def invoke(self, ctx: Context) -> object:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, TyperException, BrokenPipeError):
            raise
        except Exception as error:
            raise typer.Exit(report_error(error)) from None


def load(name: str) -> Command:
    """Import a command."""
    return command_of(name, COMMANDS.get(_module(name)))


def command_of(name: str, plug: Plug) -> Command:
    """A plug as a command of that name."""
    if isinstance(plug, typer.Typer):
        group = typer.main.get_group(plug)
        group.name = name
        return group
    app = typer.Typer(add_completion=False)
    app.command(name)(plug)
    return typer.main.get_command(app)


@lru_cache
def described(name: str) -> TyperCommand:
    """A command without its parameters, from the source of its module."""
    try:
        spec = importlib.util.find_spec(COMMANDS.module(_module(name)))
        body = ast.parse(Path(spec.origin).read_bytes()).body if spec and spec.origin else []
    except Exception as error:  # of a package that is imported to find its module
        return TyperCommand(name, help=f"cannot be read: {type(error).__name__}", rich_help_panel=OTHERS)
    values = dict(_texts(body))
    panel = values.get("PANEL", OTHERS)
    return TyperCommand(name, help=values.get(ATTRIBUTE) or values.get(name, ""), rich_help_panel=panel)


def _texts(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Names of a module → a function's docstring, a text, or the `help` of a call."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, inspect.cleandoc(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            given = (
                [k.value for k in node.value.keywords if k.arg == "help"] if isinstance(node.value, ast.Call) else []
            )
            for value in given or [node.value]:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield node.targets[0].id, value.value


def _shown(plug: str) -> str:
    """`import_` is a module, since `import` is a word of Python."""
    return plug.removesuffix("_")


def _module(name: str) -> str:
    return name if name in COMMANDS else f"{name}_"
