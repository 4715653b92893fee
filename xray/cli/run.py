"""`xray run`: the shipped lifecycle with a config, or a user's own flow."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from xray.cli.determinism import verify_determinism
from xray.cli.explain import explain
from xray.cli.supervisor import supervise
from xray.flows.lifecycle_graph import recorded_graph
from xray.tasks.output_directory import CONFIG, interrupted_stages
from xray.tasks.preflight import check_ray_address
from xray_runtime.config.loading import check_storage, load_config, parse_overrides, resolved_yaml, validate
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.files import write_atomic
from xray_runtime.graph.stage_identity import check_hub_names
from xray_runtime.lineage.log import leave
from xray_runtime.lineage.signing import signing_key
from xray_runtime.planning.demand import check_graph
from xray_runtime.planning.processor import slow_precision
from xray_runtime.planning.workload import local_node, this_machine


def run(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|MODULE:FLOW", help="YAML file of a lifecycle, or a flow of your own.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field, or the flow's parameter; repeatable."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory for everything the run writes. Default: runs/<name>.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print lifecycle.json to stdout, all else to stderr.")
    ] = False,
    until: Annotated[str | None, typer.Option(metavar="STAGE", help="The last stage to compute.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; move the directory's present content aside.")
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
        leave(directory, signing_key(directory), [directory / CONFIG], "config")
    if verify:
        raise typer.Exit(verify_determinism(job, runtime, directory, console))
    if "config" in job and (slow := slow_precision(validate(job["config"]), this_machine(runtime.device).device)):
        console.print(f"note: {slow}", soft_wrap=True, highlight=False)
    for stage, step in interrupted_stages(directory).items():
        console.print(f"[dim]found: {stage} interrupted after step {step}[/dim]", highlight=False)
    limits: dict[str, Any] = {"restarts": runtime.restarts, "stall_timeout_s": runtime.stall_timeout_s}
    raise typer.Exit(supervise(directory, console=console, as_json=as_json, until=until, **limits, **job))


def _job(target: str, overrides: list[str], output: Path | None) -> tuple[dict[str, Any], RuntimeConfig, Path]:
    """(fields of the job, the runtime its supervisor needs, output directory). Raises ConfigError."""
    _refuse_script(target)
    if ":" in target and not Path(target).exists():
        directory = (output or Path("runs") / target.rpartition(":")[2]).absolute()
        job = {"flow": target, "parameters": parse_overrides(overrides), "replace_output": output is not None}
        return job, RuntimeConfig(), directory
    if not Path(target).suffix.startswith(".y") and not Path(target).exists():
        raise ConfigError(f"{target}: no such file; name your own flow as MODULE:FLOW")
    config = load_config(target, overrides)
    directory = (output or Path("runs") / Path(target).stem).absolute()
    graph = recorded_graph(config)
    if not os.environ.get("RAY_ADDRESS"):
        # A cluster is checked once the run is connected to it.
        machine = this_machine(config.runtime.device)
        check_graph(graph, machine.device, [local_node(machine)])
    check_storage(config)
    for call in graph.calls.values():
        check_hub_names(call.kind, call.name, call.config)
    return {"config": config.model_dump(mode="json")}, config.runtime, directory


def _refuse_script(target: str) -> None:
    """Raises ConfigError if `target` is a Python file instead of a flow in it."""
    file, _, flow = target.partition(":")
    path = Path(file)
    if path.suffix != ".py":
        return
    if not path.is_file():
        raise ConfigError(f"{file}: no such file")
    module = ".".join(path.with_suffix("").parts)
    raise ConfigError(
        f"{target!r} is not allowed: must be a YAML file or MODULE:FLOW, such as {module}:{flow or _flow_in(path)}; "
        f"a script that opens a workspace of its own runs as `python {file}`"
    )


def _flow_in(path: Path) -> str:
    """Name of the first flow in a file; "FLOW" if there is none."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, RecursionError):
        return "FLOW"
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return next((f.name for f in functions if any("flow" in ast.unparse(d) for d in f.decorator_list)), "FLOW")


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
