"""Shared by `xray up`, `down`, `status` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from xray.cli.exit_codes import INTERRUPTED
from xray.deployments.server_home import ServerHome, State
from xray_runtime.kernel.terminal import say

Where = Annotated[
    Path | None, typer.Option(help="Server home: the directory of its files. Default: XRAY_HOME, else ~/.xray.")
]


def prefect_api(home: ServerHome, state: State) -> str:
    return home.environment(state)["PREFECT_API_URL"]


@contextmanager
def interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted; servers keep running: run the command again to continue, or stop them with `xray down`")
        raise typer.Exit(INTERRUPTED) from None
