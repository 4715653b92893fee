"""The Prefect task that runs every stage: identity, cache, lock, retries, MLflow run, publication.

The task only controls; the work is done by Workhorses, which reserve their own resources.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, Completed

from xray.tasks.spec import RunContext, StageSpec
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import error_summary, is_cancelled, may_retry

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.kind import StageKind

log = logging.getLogger(__name__)


def _may_retry(task: Any, task_run: Any, state: Any) -> bool:
    # Prefect ignores callable objects here, so this is a function.
    error = state.result(raise_on_failure=False)
    return not isinstance(error, BaseException) or may_retry(error)


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=_may_retry, task_run_name="{spec.name}")
def stage(
    spec: StageSpec,
    context: RunContext,
    parents: dict[str, Any],
    functions: dict[str, Callable[..., Any]],
) -> Any:
    """Run one stage and publish its checkpoint, or take it from the store; returns a `StageResult` as JSON.

    Args:
        parents: role → the parent's `StageResult`, or a `CheckpointRef`, as JSON.
        functions: reward functions that were given as objects.
    """
    from xray_runtime.kernel.cores import give_way
    from xray_runtime.kernel.graph.kinds import import_kind
    from xray_runtime.kernel.processes import redirect_output, return_freed_memory
    from xray_runtime.kernel.store.function_digest import remember_sources

    os.environ |= {name: value.get_secret_value() for name, value in context.variables.items()}
    sys.path += [path for path in context.path if path not in sys.path]
    output = Path(context.output)
    redirect_output(output / "logs" / spec.name / "stage.log")
    give_way(spec.runtime.niceness)
    _log_warnings()
    kind = import_kind(spec.kind, spec.module)
    if kind is None:
        raise ConfigError(f"{spec.name}: stage kind {spec.kind!r} is unknown on {socket.gethostname()}")
    _check_code(spec, kind)
    remember_sources(spec.sources)
    try:
        return _run(spec, context, kind, parents, functions)
    finally:
        # The process waits for the next stage, beside the models of this one.
        return_freed_memory()


def _run(
    spec: StageSpec,
    context: RunContext,
    kind: StageKind,
    parents: dict[str, Any],
    functions: dict[str, Callable[..., Any]],
) -> Any:
    """Compute the checkpoint of the stage, or take it from the store; returns what `stage` does."""
    from xray.tasks.stage_job import StageJob
    from xray_runtime.cluster.plain_errors import plain
    from xray_runtime.kernel.processes import spare_imports

    job = StageJob(spec, context, kind, parents, functions)
    spare_imports()
    try:
        with job.lock():
            result = job.find() or job.compute()
    except Exception as error:
        if not is_cancelled(error):
            if (sendable := plain(error)) is not error:
                raise sendable from None
            raise
        # A person asked to stop, so Prefect must not show a failure.
        log.info("%s", error_summary(error))
        return Cancelled(name="Stopped", message=error_summary(error))
    content = result.model_dump(mode="json")
    return Completed(name="Cached", data=content) if result.cached else content


def _check_code(spec: StageSpec, kind: StageKind) -> None:
    """Raises ConfigError if this node's code differs from the code where the graph was built."""
    from xray_runtime.kernel.graph.stage_identity import code_of
    from xray_runtime.kernel.store.identity import OTHER_ENVIRONMENT

    here = code_of(kind)
    if here != spec.code:
        changed = sorted(m for m in here.keys() | spec.code.keys() if here.get(m) != spec.code.get(m))
        raise ConfigError(f"{spec.name} on {socket.gethostname()}: {OTHER_ENVIRONMENT} ({changed[0]})")


def _log_warnings() -> None:
    """Log our messages to the stage's log, also if Prefect's handler only lets critical ones pass."""
    root = logging.getLogger()
    if all(handler.level > logging.WARNING for handler in root.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    for name in ("xray", "xray_runtime"):
        logging.getLogger(name).setLevel(logging.INFO)
