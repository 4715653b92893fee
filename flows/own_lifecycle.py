"""The lifecycle flow of `xray run`, whose config is validated already.

Making a flow's form of parameters takes a second and a half, which only a deployment needs, and each stage's process
imports the module of its flow: so this one has no form, and imports its work when it is called.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from xray.tasks.task_runner import task_runner


@flow(
    name="lifecycle",
    flow_run_name="{config.project} seed {config.seed}",
    task_runner=task_runner(),
    validate_parameters=False,
    persist_result=False,
)
def own_lifecycle(config: Any, output: str, until: str | None) -> dict[str, Any]:
    """As `xray.flows.lifecycle.lifecycle`."""
    from xray.flows.lifecycle_run import run_lifecycle

    return run_lifecycle(config, output, until)
