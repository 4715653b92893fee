"""The `xray` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from xray.cli import artifacts, chat, compare, fetch, keys, lineage, tune, up
from xray.cli.determinism import verify_determinism
from xray.cli.plan import plan
from xray.cli.promote import promote
from xray.cli.runner import BAD_INPUT
from xray.cli.serve import serve
from xray.cli.supervisor import supervise
from xray.deployments.local_services import quiet_environment
from xray.flows.lifecycle_graph import recorded_graph
from xray.tasks.preflight import check_ray_address
from xray.tasks.workspace import CONFIG, file_lock
from xray_runtime.config.loading import check_storage, load_config, resolved_yaml
from xray_runtime.config.validation import ConfigError
from xray_runtime.feedback.publication import judged_dataset
from xray_runtime.files import write_atomic
from xray_runtime.planning.demand import check_config
from xray_runtime.planning.workload import local_node, this_machine

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """X-ray: the whole life of an RLHF model as one auditable workflow."""


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
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: what the directory holds is moved aside, not continued.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify-determinism", help="Only run two steps of each stage, twice, and compare the bytes."),
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
        check_ray_address()
        if not os.environ.get("RAY_ADDRESS"):
            # What is asked of a cluster of its own is asked once the run is connected to it.
            here = this_machine(resolved.runtime.device)
            check_config(resolved, recorded_graph(resolved), here.device, [local_node(here)])
        check_storage(resolved)
        judged_dataset(resolved, directory)
        if fresh:
            _move_away(directory, console)
        directory.mkdir(parents=True, exist_ok=True)
        lock = file_lock(directory)
        if verify:
            raise typer.Exit(verify_determinism(resolved, directory, console))
        write_atomic(directory / CONFIG, resolved_yaml(resolved))
    except (ConfigError, OSError) as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(BAD_INPUT) from None
    _say_what_is_there(directory, console)
    code = supervise(
        directory,
        as_json=as_json,
        restarts=resolved.runtime.restarts,
        stall_timeout_s=resolved.runtime.stall_timeout_s,
        console=console,
    )
    lock.lock.release()
    raise typer.Exit(code)


def _move_away(directory: Path, console: Console) -> None:
    if not directory.exists() or not any(directory.iterdir()):
        return
    number = 1
    while directory.with_name(f"{directory.name}.before-{number}").exists():
        number += 1
    aside = directory.with_name(f"{directory.name}.before-{number}")
    directory.rename(aside)
    console.print(f"what was there is kept as {aside}", soft_wrap=True, highlight=False)


def _say_what_is_there(directory: Path, console: Console) -> None:
    for snapshot in sorted(directory.glob("snapshots/*/step-" + "[0-9]" * 10)):
        stage, step = snapshot.parent.name.rsplit("-", 1)[0], int(snapshot.name.removeprefix("step-"))
        console.print(f"[dim]found: {stage} interrupted after step {step}[/dim]", highlight=False)


def automations() -> None:
    """Install on the Prefect server of PREFECT_API_URL: lost runs are marked Crashed, people are told."""
    console = Console()
    if not os.environ.get("PREFECT_API_URL"):
        text = "PREFECT_API_URL: nothing is not allowed: must be the address of a Prefect server"
        Console(stderr=True).print(f"[red]error:[/red] {text}", soft_wrap=True, highlight=False)
        raise typer.Exit(BAD_INPUT)
    quiet_environment()
    from xray.deployments.automations import install

    console.print("\n".join(f"installed: {name}" for name in install()) or "all there already", highlight=False)


# In the order in which help shows them.
app.command()(run)
app.command()(plan)
tune.register(app)
up.register(app)
lineage.register(app)
app.command()(chat.chat)
compare.register(app)
app.command()(promote)
app.command()(serve)
artifacts.register(app)
fetch.register(app)
app.add_typer(keys.app, name="keys")
app.command()(automations)


def main() -> None:
    """Entry point of the `xray` script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
