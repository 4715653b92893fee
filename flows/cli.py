"""The `xray` command."""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flows import custody_commands, lineage_commands
from flows.services import quiet_environment, services
from xray_runtime.config_io import ConfigError, load_config
from xray_runtime.errors import root_cause
from xray_runtime.processes import end_marked, guard
from xray_runtime.stages.spec import plan_stages

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
lineage_commands.register(app)
custody_commands.register(app)

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


@app.callback()
def _root() -> None:
    """X-ray: the whole life of an RLHF model as one auditable workflow."""


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML file with the lifecycle's config.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field; repeatable.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Directory of everything the run makes. Default: runs/<config name>."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print lifecycle.json to stdout, all else to stderr.")
    ] = False,
) -> None:
    """Run the lifecycle: data → SFT → reward model → PPO stages → evaluation → registration.

    Exit codes: 0 done, 1 a stage failed, 2 bad input, 130 interrupted.
    """
    console = Console(stderr=as_json)
    errors = Console(stderr=True)
    try:
        resolved = load_config(config, overrides or [])
        directory = (output or Path("runs") / config.stem).absolute()
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"--output: {str(directory)!r} is not a directory")
        directory.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        errors.print(f"[red]error:[/red] {_plain(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(BAD_INPUT) from None
    mark = guard()
    signal.signal(signal.SIGTERM, _interrupt)
    quiet_environment()
    _log_to_file(directory)
    try:
        content = _run(resolved, directory, console)
    except KeyboardInterrupt:
        errors.print("interrupted: everything this run started is being stopped", highlight=False)
        # A second Ctrl-C must not cut the clean-up short.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = INTERRUPTED
    except Exception as error:
        logging.getLogger(__name__).exception("the lifecycle failed")
        cause = root_cause(error)
        errors.print(
            f"[red]failed:[/red] {type(cause).__name__}: {_plain(str(cause))}", soft_wrap=True, highlight=False
        )
        errors.print(f"logs: {directory / 'logs'}", soft_wrap=True, highlight=False)
        code = BAD_INPUT if isinstance(cause, ConfigError) else FAILED
    else:
        if as_json:
            print(json.dumps(content, indent=2))
        code = 0
    finally:
        end_marked(mark)
    raise typer.Exit(code)


def _run(config: Any, directory: Path, console: Console) -> dict[str, Any]:
    from flows.display import LiveStages, print_summary

    display = LiveStages(console)
    display.note("starting Prefect and Ray")
    with services(directory):
        from flows.lifecycle import lifecycle

        # Starting Ray put a handler of its own in place.
        signal.signal(signal.SIGTERM, _interrupt)

        # The display asks Ray, so it must end before Ray does.
        with display.watching([plan.name for plan in plan_stages(config)]):
            content = lifecycle(config, str(directory))
    print_summary(console, content, directory)
    return content


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _plain(text: str) -> str:
    # Rich reads square brackets as markup.
    return text.replace("[", "\\[")


def _log_to_file(directory: Path) -> None:
    (directory / "logs").mkdir(exist_ok=True)
    handler = logging.FileHandler(directory / "logs" / "xray.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def main() -> None:
    """Entry point of the `xray` script."""
    sys.exit(app())
