"""One attempt at a run or a search, as the supervisor's child.

`python -m flows.session OUTPUT [--json] [--search NAME]`
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.markup import escape

from flows.services import Health, quiet_environment, services
from flows.supervisor import FAILED, HEARTBEAT, INTERRUPTED, LOST
from xray_runtime.config import LifecycleConfig
from xray_runtime.config_io import ConfigError, load_config
from xray_runtime.errors import root_cause
from xray_runtime.stages.spec import plan_stages

CONFIG, SEARCH = "config.yaml", "search.yaml"
LIFECYCLE_LOCK = "lifecycle.lock"
"""Held by the flow itself, however it was started; `lock` by a command that works in the directory."""
BAD_INPUT = 2


def saved_config(output: Path, overrides: Sequence[str] = ()) -> LifecycleConfig:
    """The config `output` was last run with (the defaults where it was made elsewhere), with overrides."""
    path = output / CONFIG
    return load_config(path if path.is_file() else None, overrides)


def hold(directory: Path, name: str = "lock") -> IO[str]:
    """Keep others out of `directory`; the system lets go of it when it is closed, or with this process.

    Raises:
        ConfigError: somebody else is at work there.
    """
    file = (directory / name).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--output: another xray run is at work in {str(directory)!r}") from None
    return file


def main(output: Path, *, as_json: bool, search: str | None) -> int:
    """Run the lifecycle whose resolved config lies in `output`, or the search of that name; returns the exit code."""
    console, errors = Console(stderr=as_json), Console(stderr=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    quiet_environment()
    _log_to_file(output)
    health = Health()
    try:
        content = _search(search, output, console, health) if search else _run(output, console, health)
    except KeyboardInterrupt:
        errors.print("interrupted; running the same command again goes on from here", highlight=False)
        return INTERRUPTED
    except Exception as error:
        logging.getLogger(__name__).exception("the lifecycle failed")
        if health.lost:
            return LOST
        cause = root_cause(error)
        text = f"[red]failed:[/red] {type(cause).__name__}: {escape(str(cause))}"
        errors.print(text, soft_wrap=True, highlight=False)
        for note in getattr(cause, "__notes__", ()):
            errors.print(escape(note), soft_wrap=True, highlight=False)
        errors.print(f"logs: {output / 'logs'}", soft_wrap=True, highlight=False)
        return BAD_INPUT if isinstance(cause, ConfigError) else FAILED
    if as_json:
        print(json.dumps(content, indent=2))
    return 0


def _run(output: Path, console: Console, health: Health) -> dict[str, Any]:
    from flows.display import LiveStages, print_summary

    config = load_config(output / CONFIG)
    display = LiveStages(console, output / HEARTBEAT)
    display.note("starting Prefect and Ray")
    with services(output, health):
        from flows.lifecycle import lifecycle
        from xray_runtime.actors.placement import settled

        config, words = settled(config)
        if words:
            display.note(words)
        # Starting Ray put a handler of its own in place.
        signal.signal(signal.SIGTERM, _interrupt)
        # The display asks Ray, so it must end before Ray does.
        with display.watching([plan.name for plan in plan_stages(config)]):
            content = lifecycle(config, str(output))
    print_summary(console, content, output)
    return content


def _search(name: str, output: Path, console: Console, health: Health) -> dict[str, Any]:
    from flows.display import LiveStages, LiveTrials

    LiveStages(console, output / HEARTBEAT).note("starting Prefect and Ray")
    with services(output, health):
        from flows.search import load_search
        from flows.trials import search_directory
        from flows.tune import tune, watch_here
        from flows.tune_report import print_results

        signal.signal(signal.SIGTERM, _interrupt)
        directory = search_directory(output, name)
        config, search = load_config(directory / CONFIG), load_search(directory / SEARCH)
        with LiveTrials(console, output / HEARTBEAT) as live:
            watch_here.set(live.told)
            content = tune(config, search, str(output))
    print_results(console, content, search, directory)
    return content


def _interrupt(*_: Any) -> None:
    # A second one must not cut the clean-up short.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _log_to_file(output: Path) -> None:
    (output / "logs").mkdir(exist_ok=True)
    handler = logging.FileHandler(output / "logs" / "xray.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


if __name__ == "__main__":
    arguments = sys.argv[2:]
    wanted = arguments[arguments.index("--search") + 1] if "--search" in arguments else None
    code = main(Path(sys.argv[1]), as_json="--json" in arguments, search=wanted)
    sys.stdout.flush()
    # Threads of Ray's or Prefect's must not hold up the end; the supervisor ends what is left.
    os._exit(code)
