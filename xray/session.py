"""Workspaces in a flow, a script or a notebook, with servers if none are running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray.tasks.command import is_commanded
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.sources import SourceTerms
from xray_runtime.kernel.config.validation import validate_as
from xray_runtime.kernel.graph.artifacts import Evaluation, Model
from xray_runtime.kernel.graph.current import current_graph
from xray_runtime.kernel.graph.graph import Graph
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.planning import is_planning
from xray_runtime.kernel.tracking.registry import own_store

if TYPE_CHECKING:
    from xray.script import Script
    from xray.tasks.workspace import Workspace


@contextlib.contextmanager
def workspace(
    output: str | Path = "runs/xray",
    *,
    project: str = "xray",
    seed: int = 0,
    runtime: RuntimeConfig | Mapping[str, Any] | None = None,
    until: str | None = None,
    gates: Mapping[str, Any] | None = None,
    terms: Mapping[str, SourceTerms | Mapping[str, Any]] | None = None,
    record: Mapping[str, Any] | None = None,
    run_directory: Path | None = None,
    tags: Mapping[str, str] | None = None,
    tracking_uri: str | None = None,
    **defaults: Any,
) -> Iterator[Graph]:
    """Open an output directory: stages that are called in the block run, and the end of the block waits for them.

    A Prefect server and Ray are started unless the environment (PREFECT_API_URL, RAY_ADDRESS) or the current flow has
    them, and stopped at the end.

    Args:
        output: directory for all files of the run.
        project: MLflow experiment; a policy is registered as `<project>-policy`.
        seed: the seed of every random choice.
        runtime: devices, threads, limits and retries.
        until: the last stage to compute.
        gates: the promotion gates of a candidate; the signed record of its evaluation contains them.
        terms: source → its licence, origin and personal data, for signed records and model cards.
        record: the config of the whole run, for MLflow and lifecycle.json; by default the flow's parameters.
        run_directory: directory of lifecycle.json and the report; by default `output`.
        tags: tags of the MLflow run.
        tracking_uri: MLflow's address; by default MLFLOW_TRACKING_URI, or a database in `output`.
        defaults: fields for every stage that has them: `generator`, `frozen`, `gold`.

    Raises:
        ConfigError: an option is not allowed.
    """
    if not isinstance(runtime, RuntimeConfig):
        runtime = validate_as(RuntimeConfig, dict(runtime or {}), where="runtime")
    output, planned = Path(output).absolute(), is_planning()
    own_store(output)
    if planned is not None:
        with Graph(seed, runtime, defaults, fields=planned.fields) as graph:
            planned.graphs.append((output, graph))
            yield graph
        return
    options = defaults | {"project": project, "seed": seed, "runtime": runtime, "until": until, "gates": gates}
    options |= {"terms": terms, "record": record, "run_directory": run_directory}
    options |= {"tags": tags, "tracking_uri": tracking_uri}
    with contextlib.ExitStack() as stack:
        script = None
        # Commands have their own display and signal handlers.
        if not is_commanded():
            from xray.script import Script

            script = stack.enter_context(Script(output))
        yield stack.enter_context(_opened(output, options, script))


@contextlib.contextmanager
def _opened(output: Path, options: dict[str, Any], script: Script | None) -> Iterator[Workspace]:
    from xray.deployments.local_ray import temporary_environment
    from xray.deployments.local_services import local_services
    from xray.deployments.quiet import quiet_environment

    quiet_environment()
    with contextlib.ExitStack() as stack:
        with temporary_environment(script.tag() if script is not None else {}):
            stack.enter_context(local_services(output))
        # Imported now: Prefect reads its settings from the environment once.
        from xray.tasks.workspace import Workspace

        if script is not None:
            options = options | {"on_open": stack.enter_context(_shown())}
        workspace = Workspace(output, **options)
        if script is not None:
            script.opened(workspace)
        yield stack.enter_context(workspace)


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[Workspace], None]]:
    """Show live progress and, after success, a summary of a workspace outside of a command."""
    from rich.console import Console

    from xray.cli.display import LiveStages, print_summary

    console = Console(stderr=True)
    display = LiveStages(console)
    opened: list[Workspace] = []
    with contextlib.ExitStack() as stack:

        def watch(workspace: Workspace) -> None:
            opened.append(workspace)
            stack.enter_context(display.watching(workspace.progress))

        yield watch
    for workspace in opened:
        print_summary(console, workspace.run_record.summary.content, workspace.output)


def checkpoint(ref: str) -> Handle:
    """An existing checkpoint as an input; it is imported with its ancestors.

    Args:
        ref: a checkpoint directory; `DIR#REF` for a REF in the output directory DIR; `FILE.tar` or `FILE.tar#REF` for
            a bundle; a REF in this output directory.

    Raises:
        ConfigError: there is no such checkpoint, or its audit is not sound.
    """
    return current_graph().checkpoint(ref)


def register(policy: Handle, evaluation: Handle | None = None, name: str | None = None) -> None:
    """Make a policy the newest version of the registered model `<project>-policy`, as `candidate`.

    Args:
        evaluation: its results appear on the model card.
        name: name of the registered model.

    Raises:
        ConfigError: an input has the wrong type.
    """
    graph = current_graph()
    graph.require("register.policy", Model, policy)
    if evaluation is not None:
        graph.require("register.evaluation", Evaluation, evaluation)
    graph.register(policy, evaluation, name)
