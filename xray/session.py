"""Workspaces as people open them: in a flow, in a script or in a notebook, with servers where none are running."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import validate_as
from xray_runtime.graph.artifacts import Evaluation, Model
from xray_runtime.graph.current import current_graph, is_planning
from xray_runtime.graph.graph import Graph
from xray_runtime.graph.handles import Handle

if TYPE_CHECKING:
    from xray.script import Script
    from xray.tasks.workspace import Workspace


@contextlib.contextmanager
def workspace(output: str | Path = "runs/xray", **options: Any) -> Iterator[Graph]:
    """An output directory at work: stages that are called in the block run, and the end of the block waits for them.

    A Prefect server and a Ray are started where neither the environment (PREFECT_API_URL, RAY_ADDRESS) nor a flow at
    work has one, and stopped at the end.

    Args:
        output: directory of everything the run makes.
        options: see `Workspace`: project, seed, runtime, until, and fields for every stage that has them
            (generator, frozen, gold).

    Raises:
        ConfigError: an option is not allowed.
    """
    planned = is_planning()
    if planned is not None:
        runtime, seed = options.pop("runtime", {}), options.pop("seed", 0)
        if not isinstance(runtime, RuntimeConfig):
            runtime = validate_as(RuntimeConfig, dict(runtime or {}), where="runtime")
        for name in ("project", "until", "gates", "terms", "record", "place", "tags", "tracking_uri"):
            options.pop(name, None)
        with Graph(seed, runtime, options, fields=planned.fields) as graph:
            planned.graphs.append((Path(output).absolute(), graph))
            yield graph
        return
    with contextlib.ExitStack() as stack:
        script = None
        if not _is_shown():
            from xray.script import Script

            script = stack.enter_context(Script(Path(output).absolute()))
        yield stack.enter_context(_opened(output, options, script))


def _is_shown() -> bool:
    """Whether a command shows how the run goes and ends."""
    module = sys.modules.get("xray.tasks.workspace")
    return module is not None and module.on_open.get() is not None


@contextlib.contextmanager
def _opened(output: str | Path, options: dict[str, Any], script: Script | None) -> Iterator[Workspace]:
    from xray.deployments.local_ray import temporary_environment
    from xray.deployments.local_services import local_services, quiet_environment

    quiet_environment()
    with contextlib.ExitStack() as stack:
        with temporary_environment(script.tag() if script is not None else {}):
            stack.enter_context(local_services(Path(output).absolute()))
        # Imported now: Prefect reads its settings from the environment once.
        from xray.tasks.workspace import Workspace

        workspace = Workspace(output, **options)
        if script is not None:
            script.opened(workspace)
            stack.enter_context(_shown(workspace))
        yield stack.enter_context(workspace)


@contextlib.contextmanager
def _shown(workspace: Workspace) -> Iterator[None]:
    """Live progress and, where it ends well, a summary of a workspace that nobody else shows."""
    from rich.console import Console

    from xray.cli.display import LiveStages, print_summary
    from xray.tasks.workspace import on_open

    console = Console(stderr=True)
    display = LiveStages(console)
    with contextlib.ExitStack() as stack:
        token = on_open.set(lambda opened: stack.enter_context(display.watching(opened.progress)))
        try:
            yield
        finally:
            on_open.reset(token)
    print_summary(console, workspace.run_record.summary.content, workspace.output)


def checkpoint(ref: str) -> Handle:
    """A checkpoint that exists already, as an input: it is brought here with all it came from.

    Args:
        ref: a checkpoint directory; `DIR#REF` for a REF in the output directory DIR; `FILE.tar` or `FILE.tar#REF` for
            a bundle; a REF in this output directory.

    Raises:
        ConfigError: it names none, or one whose audit is not sound.
    """
    return current_graph().checkpoint(ref)


def register(policy: Handle, evaluation: Handle | None = None, name: str | None = None) -> None:
    """Make a policy the newest version of the registered model `<project>-policy`, as `candidate`.

    Args:
        evaluation: of the policy; its results go on the model card.
        name: of the registered model.

    Raises:
        ConfigError: one of them is of another type.
    """
    graph = current_graph()
    graph.require("register.policy", Model, policy)
    if evaluation is not None:
        graph.require("register.evaluation", Evaluation, evaluation)
    graph.register(policy, evaluation, name)
