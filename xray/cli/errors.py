"""Errors of a command: one line on stderr and an exit code; an unexpected error also writes its traceback to a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Iterator

import typer

from xray.cli.exit_codes import BAD_INPUT, FAILED
from xray_runtime.kernel.errors import root_cause


def report_error(error: Exception) -> int:
    """Print why a command failed, in one line; returns its exit code."""
    from xray.deployments.patience import NotUpError
    from xray_runtime.kernel.config.validation import ConfigError

    if isinstance(error, ConfigError | OSError):
        print_error("error", str(error))
        return BAD_INPUT
    if isinstance(error, NotUpError):
        print_error("failed", str(error))
        return FAILED
    descriptor, path = tempfile.mkstemp(prefix="xray-error-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        traceback.print_exception(error, file=file)
    print_error("failed", f"{type(error).__name__}: {error} (please report it, with {path})")
    return FAILED


@contextlib.contextmanager
def root_cause_only(hint: str = "") -> Iterator[None]:
    """Turn an exception of a flow or an actor into one line with its root cause. Bad input passes through."""
    from xray_runtime.kernel.config.validation import ConfigError

    try:
        yield
    except (ConfigError, OSError, typer.Abort, typer.Exit):
        raise
    except Exception as error:
        cause = root_cause(error)
        print_error("failed", f"{type(cause).__name__}: {cause}{hint}")
        raise typer.Exit(FAILED) from None


def print_error(kind: str, text: str) -> None:
    """Print `KIND: TEXT` on stderr, in one line."""
    # Imported late: most commands end well.
    from rich.console import Console
    from rich.markup import escape

    line = " ".join(text.split())
    Console(stderr=True).print(f"[red]{kind}:[/red] {escape(line)}", soft_wrap=True, highlight=False)
