"""Errors of a command: one line on stderr and an exit code; an unexpected error also writes its traceback to a file."""

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

from xray.cli.job import BAD_INPUT, FAILED
from xray.deployments.local_services import quiet_environment
from xray.deployments.patience import NotUpError
from xray_runtime.config.validation import ConfigError
from xray_runtime.errors import root_cause


class Commands(TyperGroup):
    """Commands whose errors are one line each, with Prefect's, Ray's and MLflow's chatter switched off."""

    def invoke(self, ctx: Any) -> Any:
        quiet_environment()
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, TyperException, BrokenPipeError):
            raise
        except (ConfigError, OSError) as error:
            print_error("error", str(error))
            raise typer.Exit(BAD_INPUT) from None
        except NotUpError as error:
            print_error("failed", str(error))
            raise typer.Exit(FAILED) from None
        except Exception as error:
            descriptor, path = tempfile.mkstemp(prefix="xray-error-", suffix=".log")
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                traceback.print_exception(error, file=file)
            print_error("failed", f"{type(error).__name__}: {error} (please report it, with {path})")
            raise typer.Exit(FAILED) from None


@contextlib.contextmanager
def root_cause_only(hint: str = "") -> Iterator[None]:
    """Turn an exception of a flow or an actor into one line with its root cause. Bad input passes through."""
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
    line = " ".join(text.split())
    Console(stderr=True).print(f"[red]{kind}:[/red] {escape(line)}", soft_wrap=True, highlight=False)
