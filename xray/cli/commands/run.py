"""`xray run`: the shipped lifecycle with a config, or a user's own flow."""

from __future__ import annotations

import json
import tempfile
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from xray.cli.options import Overrides, Target
from xray.cli.supervisor import supervise
from xray.flows.subject import Subject, output_directory, read_subject
from xray.tasks.output_directory import CONFIG, interrupted_stages
from xray.tasks.preflight import check_before_start, check_ray_address
from xray_runtime.cluster.pool.machine import this_machine
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import LIFECYCLE
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.terminal import print_table
from xray_runtime.methods.loading import resolved_yaml
from xray_runtime.ops.planner.precision import slow_precision

PANEL = "Run"


def command(
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
        bool, typer.Option("--verify-determinism", help="Run a step or two of each stage twice and compare the bytes.")
    ] = False,
) -> None:
    """Run a lifecycle: data → SFT → reward model → PPO stages → evaluation → registration.

    Exit codes: 0 done, 1 a stage failed, 2 bad input, 130 interrupted.
    """
    console = Console(stderr=as_json)
    subject, directory = read_subject(target, overrides or []), output_directory(target, output)
    graph = None
    if subject.config is not None:
        graph = subject.recorded()
        check_before_start(graph, None if why else directory)
        if until is not None and until not in graph.calls:
            raise ConfigError(f"--until: {until!r} is not allowed: must be one of {', '.join(graph.calls)}")
    if why and fresh:
        raise ConfigError("--explain: cannot be combined with --fresh, which computes every stage")
    runtime = graph.runtime if graph is not None else _flow_runtime(subject)
    if why:
        from xray.cli.explain import explain

        explain(subject, graph, directory, console, replace_output=output is not None)
        return
    check_ray_address()
    evidence().require_signer()
    if fresh:
        _move_away(directory, console)
    directory.mkdir(parents=True, exist_ok=True)
    if subject.config is not None:
        write_atomic(directory / CONFIG, resolved_yaml(subject.config))
        evidence().log_files(directory, [directory / CONFIG], "config")
    if verify:
        raise typer.Exit(verify_determinism(subject, runtime, directory, console))
    if graph is not None and (slow := slow_precision(graph, this_machine(runtime.device).device)):
        console.print(f"note: {slow}", soft_wrap=True, highlight=False)
    for stage, step in interrupted_stages(directory).items():
        console.print(f"[dim]found: {stage} interrupted after step {step}[/dim]", highlight=False)
    fields = {"replace_output": output is not None, "until": until, "as_json": as_json}
    raise typer.Exit(supervise(directory, subject, runtime, console, **fields))


def _flow_runtime(subject: Subject) -> RuntimeConfig:
    # Without fields, a flow is not called before it runs; with some, one that belongs to no stage is refused.
    graphs = subject.recorded_graphs()[0] if subject.fields else []
    return graphs[0][1].runtime if graphs else RuntimeConfig()


def _move_away(directory: Path, console: Console) -> None:
    if not directory.exists() or not any(directory.iterdir()):
        return
    numbered = (directory.with_name(f"{directory.name}.before-{number}") for number in count(1))
    aside = next(path for path in numbered if not path.exists())
    directory.rename(aside)
    console.print(f"the previous content was moved to {aside}", soft_wrap=True, highlight=False)


def verify_determinism(subject: Subject, runtime: RuntimeConfig, directory: Path, console: Console) -> int:
    """Run the shortened graph twice below `directory`; returns 0 if every checkpoint has the same bytes, else 1."""
    # A shared store would supply the second result.
    subject = subject.with_values({"runtime.storage": None})
    once = runtime.model_copy(update={"restarts": 0})
    digests: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="determinism-") as root:
        for name in ("first", "second"):
            output = Path(root) / name
            output.mkdir()
            console.print(f"{name} run, a step or two of each stage", highlight=False)
            code = supervise(output, subject, once, console, replace_output=True, shorten=True)
            if code:
                return code
            content = json.loads((output / LIFECYCLE).read_text())
            digests.append({stage["name"]: stage["checkpoint"]["sha256"] for stage in content["stages"]})
    first, second = digests
    rows = [
        (stage, sha256[:12], second.get(stage, "")[:12], "same bytes" if sha256 == second.get(stage) else "DIFFERENT")
        for stage, sha256 in first.items()
    ]
    print_table(console, ("stage", "first", "second", ""), rows)
    return 0 if first == second else 1
