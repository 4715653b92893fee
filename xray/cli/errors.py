"""Errors of a command are one line: bad input with exit code 2, anything else with 1 and a file that says more."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup
from typer.exceptions import TyperException

from xray_runtime.config.validation import ConfigError

BAD_INPUT, FAILED = 2, 1


class Commands(TyperGroup):
    """Commands that end in one line whatever happens."""

    def invoke(self, ctx: Any) -> Any:
        with one_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Errors become a line on stderr and `typer.Exit`."""
    try:
        yield
    except (typer.Exit, typer.Abort, TyperException, BrokenPipeError):
        raise
    except (ConfigError, OSError) as error:
        _print("error", str(error))
        raise typer.Exit(BAD_INPUT) from None
    except Exception as error:
        descriptor, path = tempfile.mkstemp(prefix="xray-error-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
        _print("failed", f"{type(error).__name__}: {error} (please report it, with {path})")
        raise typer.Exit(FAILED) from None


def _print(kind: str, text: str) -> None:
    line = " ".join(text.split())
    Console(stderr=True).print(f"[red]{kind}:[/red] {escape(line)}", soft_wrap=True, highlight=False)
