"""Signals and errors of a workspace in a script or a notebook.

An interruption (Ctrl-C, SIGTERM) lets stages write a last snapshot; a second one does not wait. Errors that the script
itself did not cause are one line. All processes of a script end with it, even after SIGKILL, and its records say how it
ended.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from xray.cli.exit_codes import INTERRUPTED
from xray.deployments.patience import NotUpError
from xray.tasks.lost_runs import command_to_close
from xray.tasks.output_directory import resume_point
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.processes import TAG, start_reaper

if TYPE_CHECKING:
    from xray.tasks.workspace import Workspace

DEFAULTS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""Signal → Python's default handler; a signal with another handler keeps it."""


class Script:
    """A script or notebook while a workspace in `output` is open."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._workspace: Workspace | None = None
        self._interrupts = 0
        self._signals: list[signal.Signals] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._signals = [number for number, default in DEFAULTS.items() if signal.getsignal(number) == default]
        self.install_handlers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._signals:
            signal.signal(number, DEFAULTS[number])
        if isinstance(error, KeyboardInterrupt):
            line = f"interrupted; run it again to continue from {resume_point(self._output)}"
            if _in_notebook() or _in_flow():
                show_as(error, [line])
                return
            print(line, file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        stage_failed = self._workspace is not None and self._workspace.has_failed_with(error)
        is_not_opened = self._workspace is None and isinstance(error, NotUpError | ConfigError)
        if error is not None and (stage_failed or is_not_opened):
            from xray.cli.display import failure_lines

            show_as(error, failure_lines(error, self._output))

    def opened(self, workspace: Workspace) -> None:
        """Called when the servers are up; Ray has replaced the signal handlers."""
        self._workspace = workspace
        self.install_handlers()

    def install_handlers(self) -> None:
        for number in self._signals:
            signal.signal(number, self._interrupt)

    def tag(self) -> dict[str, str]:
        """The environment variable with the process tag: tagged processes end with this one."""
        return {TAG: _reaper(self._output)}

    def _interrupt(self, *_: Any) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            print("stopping after the current step, with a snapshot; interrupt again to stop at once", file=sys.stderr)
            raise KeyboardInterrupt
        if not _in_notebook():
            # The reaper kills tagged processes and closes the records.
            os._exit(INTERRUPTED)


@functools.cache
def _reaper(output: Path) -> str:
    before = os.environ.get(TAG)
    tag = start_reaper(*command_to_close(output))
    # The script's other processes are not tagged.
    del os.environ[TAG]
    if before is not None:
        os.environ[TAG] = before
    return tag


def show_as(error: BaseException, lines: list[str]) -> None:
    """Make Python and notebooks print `lines` instead of the traceback of `error`."""
    # IPython's protocol, which our hook also follows.
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    if sys.excepthook is not _hook:
        global _former_hook
        _former_hook, sys.excepthook = sys.excepthook, _hook


_former_hook = sys.__excepthook__


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    render = getattr(error, "_render_traceback_", None)
    if render is None:
        _former_hook(kind, error, trace)
    else:
        print("\n".join(render()), file=sys.stderr)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _in_flow() -> bool:
    prefect = sys.modules.get("prefect.context")
    return prefect is not None and prefect.FlowRunContext.get() is not None
