"""Registers a policy: model card, registry, and a signed decision."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from filelock import FileLock

from xray.tasks.output_directory import LOCKS
from xray.tasks.spec import RunContext, StageResult


def register(
    context: RunContext, name: str, policy: dict[str, Any], evaluation: dict[str, Any] | None
) -> dict[str, str]:
    """Make a policy the newest version of the registered model `name`, as `candidate`.

    Args:
        policy: the `StageResult` of the policy, as JSON.
        evaluation: the `StageResult` of its evaluation, for the model card.
    """
    from xray_runtime.kernel.history.evidence import evidence
    from xray_runtime.kernel.history.reference import CANDIDATE
    from xray_runtime.kernel.tracking.mlflow_tracker import Tracker

    os.environ |= {k: value.get_secret_value() for k, value in context.variables.items()}
    output = Path(context.output)
    registered = StageResult.model_validate(policy)
    if evaluation is not None:
        evidence().publish_card(StageResult.model_validate(evaluation).checkpoint.path, registered.checkpoint.path)
    tracker = Tracker(context.tracking_uri, context.experiment, None)
    run_id = registered.mlflow_run_id
    if not run_id:  # A checkpoint that existed before the run.
        run_id = str(tracker.client.get_logged_model(registered.checkpoint.mlflow_model_id or "").source_run_id)
    # When two runs share a directory, the last one to move the alias must also decide last.
    with FileLock(output / LOCKS / "decisions.lock"):
        version = evidence().register_policy(
            output,
            tracker.registry,
            name,
            registered.checkpoint,
            run_id,
            StageResult.model_validate(evaluation).checkpoint if evaluation is not None else None,
            by=context.trigger.get("by"),
            note=f"flow run {context.flow_run_id}",
        )
    return {"name": name, "version": version, "alias": CANDIDATE}
