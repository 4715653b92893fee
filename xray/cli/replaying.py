"""A stage's body that runs again on a private Ray, for `xray replay` and `xray bundle`."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from filelock import FileLock
from rich.console import Console
from rich.text import Text

from xray.cli.errors import root_cause_only
from xray.deployments.local_ray import running_ray
from xray_runtime.kernel.processes import kill_tagged, start_reaper

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import OpenModels
    from xray_runtime.kernel.store.identity import Identity
    from xray_runtime.trust.recompute import OnProgress
    from xray_runtime.trust.replay import Replay
    from xray_runtime.trust.replayable import Replayable

Modules = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Module that registers a stage kind of your own; repeatable."),
]


PREFIX, LOCK, NEW_LOCK = "xray-replay-", ".lock", ".lock.new"


@contextlib.contextmanager
def scratch_directory(output: Path | None) -> Iterator[Path]:
    """A directory of this process; whatever the block starts ends with it. A killed process leaves it to the next call.

    Args:
        output: the output directory whose disk it is on; None: the system's directory for such files.
    """
    folder = output or Path(tempfile.gettempdir())
    for left in folder.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), FileLock(left, timeout=0):  # filelock's Timeout is one
            shutil.rmtree(left.parent)
    tag = start_reaper()
    # Another call may remove it while this one does: what is left then is for the next.
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        with FileLock(scratch / NEW_LOCK):
            # Other calls see a lock that is held, and none between its file and its lock.
            (scratch / NEW_LOCK).rename(scratch / LOCK)
            try:
                yield scratch
            finally:
                kill_tagged(tag)


@contextlib.contextmanager
def opened(stage: Replayable, scratch: Path, console: Console) -> Iterator[tuple[OpenModels, OnProgress]]:
    """(how the stage's body opens its models, how it reports its progress)."""
    from xray_runtime.cluster.opening import model_opener
    from xray_runtime.data.pictures import FOLDER

    logs = scratch / "logs" / stage.node.manifest.stage
    pictures = tuple(folder for path in stage.paths.values() if (folder := path / FOLDER).is_dir())
    # In a run, warnings of libraries go to the stage's log.
    warnings.simplefilter("ignore")

    def show(done: int, total: int, unit: str, note: str) -> None:
        console.print(Text(f"{done} of {total} {unit} {note}".rstrip(), style="dim"))

    with running_ray(), root_cause_only():
        yield model_opener(stage.runtime, logs, f"replay-{stage.node.sha256[:12]}", pictures), show


def identity_now(stage: Replayable, scratch: Path) -> Identity | str:
    """The stage's identity with the code and libraries that are here, or why it has none: an agent that is gone, which
    a replay does not need."""
    from xray_runtime.kernel.store.digest_memory import DigestMemory

    try:
        return stage.identity(DigestMemory(scratch / "digests.sqlite"))
    except ValueError as error:
        return str(error)


def changes(stage: Replayable, now: Identity | str) -> list[str]:
    """Code and libraries that changed since the stage was computed."""
    from xray.cli.explain import differences

    return [now] if isinstance(now, str) else differences(stage.node.manifest.identity, now)


def show_changes(console: Console, changed: list[str]) -> None:
    for change in changed:
        console.print(Text(f"changed since then: {change}"))


def summary(result: Replay) -> list[str]:
    """The result of a replay for people."""
    notes = (
        [f"scores of servers were read from the ledger, not requested again: {', '.join(result.taken)}"]
        if result.taken
        else []
    )
    if result.difference is None:
        weights = f"; weights {result.weights[:12]}" if result.weights else ""
        parts = [f"{result.files} files of the checkpoint"] if result.files else []
        if result.compared:
            parts.append(f"rollouts of {len(result.compared)} iterations, to iteration {max(result.compared)}")
        return [*notes, f"the same bytes: {', '.join(parts)}{weights}"]
    lines = [*notes, f"DIFFERENT: {result.difference}"]
    if result.changed_since:
        lines.append("Recomputing gives the published bytes: the file was changed afterwards (see `xray audit`).")
    return lines
