"""`xray tune`: checks the search before anything is computed, then has it supervised like a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from xray.cli.supervisor import supervise
from xray.flows.lifecycle_graph import recorded_graph
from xray.flows.search import load_search, search_space
from xray.tasks.output_directory import CONFIG, SEARCH, file_lock
from xray.tasks.preflight import check_ray_address
from xray_runtime.config.loading import check_storage, load_config, resolved_yaml
from xray_runtime.config.validation import ConfigError
from xray_runtime.files import write_atomic
from xray_runtime.planning.demand import check_config
from xray_runtime.planning.workload import local_node, this_machine


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(tune)


def tune(
    config: Annotated[Path, typer.Argument(help="YAML file with the lifecycle's config.")],
    search: Annotated[Path, typer.Option("--search", help="YAML file with the fields, their ranges and the metric.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field; repeatable.")
    ] = None,
    trials: Annotated[int | None, typer.Option("--trials", help="Number of trials. Default: the search's.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Directory for everything the trials write. Default: runs/<config name>."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json to stdout, all else to stderr.")] = False,
) -> None:
    """Search over fields of the config: each trial is a lifecycle, and shared stages are computed once.

    Run the same command again to continue; a larger --trials adds trials.

    Exit codes: 0 done, 1 no trial finished, 2 bad input, 130 interrupted.
    """
    _tune(config, search, overrides or [], trials, output, as_json)


def _tune(
    config: Path, search: Path, overrides: list[str], trials: int | None, output: Path | None, as_json: bool
) -> None:
    resolved, wanted = load_config(config, overrides), load_search(search, trials)
    try:
        search_space(resolved, wanted)
    except ConfigError as error:
        raise ConfigError(f"{search}: {error}") from None
    root = (output or Path("runs") / config.stem).absolute()
    if root.exists() and not root.is_dir():
        raise ConfigError(f"--output: {str(root)!r} is not a directory")
    check_ray_address()
    if not os.environ.get("RAY_ADDRESS"):
        here = this_machine(resolved.runtime.device)
        check_config(resolved, recorded_graph(resolved), here.device, [local_node(here)])
    check_storage(resolved)
    directory = root / "searches" / wanted.name
    directory.mkdir(parents=True, exist_ok=True)
    lock = file_lock(directory)
    write_atomic(directory / CONFIG, resolved_yaml(resolved))
    write_atomic(directory / SEARCH, yaml.safe_dump(wanted.model_dump(mode="json"), sort_keys=False))
    code = supervise(
        root,
        as_json=as_json,
        restarts=resolved.runtime.restarts,
        stall_timeout_s=resolved.runtime.stall_timeout_s,
        console=Console(stderr=as_json),
        search=wanted.name,
    )
    lock.lock.release()
    raise typer.Exit(code)
