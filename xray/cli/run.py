"""`xray run`: the shipped lifecycle with a config, or a user's own flow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from xray.cli.determinism import verify_determinism
from xray.cli.explain import explain
from xray.cli.options import Overrides, Target
from xray.cli.supervisor import supervise
from xray.flows.lifecycle_graph import recorded_graph
from xray.flows.subject import output_name, read_subject
from xray.tasks.output_directory import CONFIG, interrupted_stages
from xray.tasks.preflight import check_before_start, check_ray_address
from xray_runtime.config.loading import resolved_yaml, validate
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.files import write_atomic
from xray_runtime.lineage.log import log_files
from xray_runtime.lineage.signing import signing_key
from xray_runtime.planning.processor import slow_precision
from xray_runtime.planning.workload import this_machine


def run(
    target: Target,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory for everything the run writes. Default: runs/<name>.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print lifecycle.json to stdout, all else to stderr.")
    ] = False,
    until: Annotated[str | None, typer.Option(metavar="STAGE", help="The last stage to compute.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; move the directory's current content aside.")
    ] = False,
    why: Annotated[
        bool, typer.Option("--explain", help="Run nothing; for each stage, explain why it is cached or what changed.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify-determinism", help="Run a step or two of each stage twice and compare the bytes."),
    ] = False,
) -> None:
    """Run a lifecycle: data → SFT → reward model → PPO stages → evaluation → registration.

    Exit codes: 0 done, 1 a stage failed, 2 bad input, 130 interrupted.
    """
    console = Console(stderr=as_json)
    job, runtime, directory = _job(target, overrides or [], output)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--output: {str(directory)!r} is not a directory")
    if until is not None:
        _check_stage(until, job)
    if why and fresh:
        raise ConfigError("--explain: cannot be combined with --fresh, which computes every stage")
    if why:
        raise typer.Exit(explain(job, directory, console))
    check_ray_address()
    if fresh:
        _move_away(directory, console)
    directory.mkdir(parents=True, exist_ok=True)
    if "config" in job:
        write_atomic(directory / CONFIG, resolved_yaml(validate(job["config"])))
        log_files(directory, signing_key(directory), [directory / CONFIG], "config")
    if verify:
        raise typer.Exit(verify_determinism(job, runtime, directory, console))
    if "config" in job and (
        slow := slow_precision(recorded_graph(validate(job["config"])), this_machine(runtime.device).device)
    ):
        console.print(f"note: {slow}", soft_wrap=True, highlight=False)
    for stage, step in interrupted_stages(directory).items():
        console.print(f"[dim]found: {stage} interrupted after step {step}[/dim]", highlight=False)
    limits: dict[str, Any] = {"restarts": runtime.restarts, "stall_timeout_s": runtime.stall_timeout_s}
    raise typer.Exit(supervise(directory, console=console, as_json=as_json, until=until, **limits, **job))


def _job(target: str, overrides: list[str], output: Path | None) -> tuple[dict[str, Any], RuntimeConfig, Path]:
    """(fields of the job, runtime for its supervisor, output directory). Raises ConfigError."""
    subject = read_subject(target, overrides)
    directory = (output or Path("runs") / output_name(target)).absolute()
    config = subject.config
    if config is None:
        # Refuse a field that belongs to no stage.
        graphs = subject.recorded_graphs()[0] if subject.fields else []
        runtime = graphs[0][1].runtime if graphs else RuntimeConfig()
        return subject.job() | {"replace_output": output is not None}, runtime, directory
    check_before_start(recorded_graph(config))
    return subject.job(), config.runtime, directory


def _check_stage(until: str, job: dict[str, Any]) -> None:
    if "config" not in job:
        return
    stages = list(recorded_graph(validate(job["config"])).calls)
    if until not in stages:
        raise ConfigError(f"--until: {until!r} is not allowed: must be one of {', '.join(stages)}")


def _move_away(directory: Path, console: Console) -> None:
    if not directory.exists() or not any(directory.iterdir()):
        return
    number = 1
    while directory.with_name(f"{directory.name}.before-{number}").exists():
        number += 1
    aside = directory.with_name(f"{directory.name}.before-{number}")
    directory.rename(aside)
    console.print(f"the previous content was moved to {aside}", soft_wrap=True, highlight=False)
