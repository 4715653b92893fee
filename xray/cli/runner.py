"""One attempt at a run or a search, as the supervisor's child.

`python -m xray.cli.runner OUTPUT [--json] [--search NAME]`
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from xray.cli.supervisor import FAILED, HEARTBEAT, INTERRUPTED
from xray.deployments.local_services import LOST, Health, quiet_environment, services
from xray.tasks.workspace import CONFIG, SEARCH
from xray_runtime.config.loading import load_config
from xray_runtime.config.validation import ConfigError
from xray_runtime.errors import root_cause
from xray_runtime.stages.spec import plan_stages

BAD_INPUT = 2


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
    from xray.cli.display import LiveStages, print_summary

    config = load_config(output / CONFIG)
    display = LiveStages(console, output / HEARTBEAT)
    display.note("starting Prefect and Ray")
    with services(output, health):
        from xray.flows.lifecycle import lifecycle
        from xray_runtime.workers.placement import resolve_layouts

        config, words = resolve_layouts(config)
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
    from xray.cli.display import LiveStages, LiveTrials

    LiveStages(console, output / HEARTBEAT).note("starting Prefect and Ray")
    with services(output, health):
        from xray.flows.search import load_search
        from xray.flows.trials import search_directory
        from xray.flows.tune import tune, watch_here
        from xray.flows.tune_report import print_results

        signal.signal(signal.SIGTERM, _interrupt)
        directory = search_directory(output, name)
        config, search = load_config(directory / CONFIG), load_search(directory / SEARCH)
        with LiveTrials(console, output / HEARTBEAT) as live:
            watch_here.set(live.error_summary)
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
