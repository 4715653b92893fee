"""Terminal output: one line per stage with rate and remaining time, then a summary."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn as TimeLeftColumn,
)

from xray.deployments.patience import NotUpError
from xray.tasks.summary import evaluation_rows
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.credentials import tracking_address
from xray_runtime.kernel.errors import root_cause
from xray_runtime.kernel.report.rendering import computed_text
from xray_runtime.kernel.terminal import print_indented, print_table
from xray_runtime.kernel.tracking.registry import own_store

if TYPE_CHECKING:
    from xray.flows.tune import TrialRun

POLL_SECONDS = 0.5
TITLE = 12
"""Width of the title column of the summary."""
PLAIN_SECONDS = 15.0
"""Without a terminal, each stage prints a line this often."""


class LiveStages:
    """Live progress of all stages, from the run's progress actor; plain lines without a terminal.

    Args:
        heartbeat: file to touch whenever there is progress.
    """

    def __init__(self, console: Console, heartbeat: Path | None = None) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:12}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeLeftColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._heartbeat, self._latest = heartbeat, dict[str, Any]()
        self._tasks: dict[str, Any] = {}
        self._printed: dict[str, tuple[float, bool]] = {}
        self._started: dict[str, float] = {}

    def note(self, text: str) -> None:
        self._console.print(f"[dim]{text}[/dim]", highlight=False)

    def watching(self, progress: Any) -> contextlib.AbstractContextManager[None]:
        """Follow the stages that report to a run's progress actor while the context lasts."""
        return self._following(lambda: _latest(progress))

    @contextlib.contextmanager
    def _following(self, read: Callable[[], dict[str, Any]]) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._follow, args=(read, ended), daemon=True)
        self._progress.start()
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._progress.stop()

    def _follow(self, read: Callable[[], dict[str, Any]], ended: threading.Event) -> None:
        while True:
            last = ended.wait(POLL_SECONDS)
            with contextlib.suppress(Exception):  # the cluster may be shutting down
                latest = read()
                if latest != self._latest and self._heartbeat is not None:
                    self._heartbeat.touch()
                self._latest = latest
                for gone in self._tasks.keys() - latest.keys():
                    self._progress.remove_task(self._tasks.pop(gone))
                for stage, done in latest.items():
                    self._show(stage, *done)
            if last:
                return

    def _show(self, stage: str, done: int, total: int, unit: str, note: str, parts: int) -> None:
        if self._console.is_terminal:
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=None, note="")
            text = f"{unit} {note} (at work: {parts})" if parts else f"{unit} {note}"
            self._progress.update(self._tasks[stage], completed=done, total=total or None, note=text)
            return
        if not total:
            return
        now = time.monotonic()
        printed, finished = self._printed.get(stage, (0.0, False))
        ends = done == total
        if finished if ends else now - printed < PLAIN_SECONDS:
            return
        self._printed[stage] = (now, ends)
        elapsed = now - self._started.setdefault(stage, now)
        rate = f" {done / elapsed:.2f}/s, {(total - done) * elapsed / done:.0f} s left" if done and elapsed > 1 else ""
        self._console.print(f"{stage}: {done}/{total} {unit}{rate} {note}", highlight=False, soft_wrap=True)


def _latest(progress: Any) -> dict[str, Any]:
    import ray

    latest: dict[str, Any] = ray.get(progress.read.remote(), timeout=5)
    return latest


class LiveTrials(LiveStages):
    """A line when a trial begins or ends, and live progress of the stages of running trials."""

    def __init__(self, console: Console, heartbeat: Path) -> None:
        super().__init__(console, heartbeat)
        self._running: dict[int, TrialRun] = {}

    def watching_trials(self) -> contextlib.AbstractContextManager[None]:
        """Follow running trials while the context lasts."""
        return self._following(self._stages)

    def show_event(self, trial: TrialRun) -> None:
        """Show that a trial began or ended."""
        if self._heartbeat is not None:
            self._heartbeat.touch()
        if trial.has_ended:
            self._running.pop(trial.number, None)
        else:
            self._running[trial.number] = trial
        self._console.print(f"trial {trial.number}: {trial.text}", highlight=False, soft_wrap=True, markup=False)

    def _stages(self) -> dict[str, Any]:
        running = {number: trial.progress for number, trial in list(self._running.items())}
        return {
            f"{number} {stage}": done
            for number, progress in running.items()
            if progress is not None
            for stage, done in _latest(progress).items()
        }


def failure_lines(error: BaseException, output: Path) -> list[str]:
    """The cause of a failed run, and the directory of its logs."""
    cause = root_cause(error)
    reason = f"error: {cause}" if isinstance(cause, ConfigError) else f"failed: {type(cause).__name__}: {cause}"
    if isinstance(cause, NotUpError):
        reason = f"failed: {cause}"
    return [reason, *getattr(cause, "__notes__", ()), f"logs: {output / 'logs'}"]


def print_summary(console: Console, content: dict[str, Any], output: Path) -> None:
    """Print the main results, what may be wrong, paths of reports, stages, and what was left out."""
    stages, e, registered = content["stages"], content["evaluation"], content["registered"]
    lines = [f"{title:{TITLE}}{text}" for title, text in evaluation_rows(e)] if e is not None else []
    found = [(s["name"], text, text in s.get("notes", ())) for s in stages for text in s["findings"]]
    alerts, notes = ([(name, text) for name, text, is_note in found if is_note == wanted] for wanted in (False, True))
    lines += [f"{'look at':{TITLE}}{name}: {text}" for name, text in alerts]
    lines += [""] if lines else []
    if registered is not None:
        lines.append(f"registered  {registered['name']} version {registered['version']} @{registered['alias']}")
    lines += [
        f"report      {output / 'report.html'}",
        f"record      {output / 'lifecycle.json'}",
        f"pages       xray studio --output {output}",
        *mlflow_page_lines(content["mlflow_page"], output),
        "",
    ]
    for line in lines:
        print_indented(console, line[:TITLE], line[TITLE:])
    rows = [(stage["name"], stage["checkpoint"]["sha256"][:12], computed_text(stage)) for stage in stages]
    print_table(console, ("stage", "checkpoint", "computed in"), rows)
    if notes:
        console.print()
    for name, text in notes:
        print_indented(console, f"{name}: ", text)


def mlflow_page_lines(page: str, output: Path) -> list[str]:
    """The run's page on an MLflow server, or the command that starts a server for it."""
    if page.startswith("http"):
        return [f"in MLflow   {page}"]
    # MLflow's client also sets the variable for a store without a server.
    store = tracking_address() or own_store(output)
    return [f"in MLflow   mlflow ui --backend-store-uri {store}", f"            and then http://127.0.0.1:5000/{page}"]
