"""The lifecycle flow: prepare → base → SFT → preferences → reward model → PPO stages → evaluation → registration.

A repeated run only computes what is new; missing or damaged checkpoints are computed again.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from xray.tasks.task_runner import task_runner
from xray_runtime.methods.lifecycle import LifecycleConfig


@flow(
    name="lifecycle",
    flow_run_name="{config.project} seed {config.seed}",
    task_runner=task_runner(),
    persist_result=False,
)
def lifecycle(config: LifecycleConfig, output: str = "runs/lifecycle", until: str | None = None) -> dict[str, Any]:
    """Run a whole lifecycle into the directory `output`; returns the content of lifecycle.json.

    Args:
        until: the last stage to compute; nothing is registered then.
    """
    from xray.flows.lifecycle_run import run_lifecycle

    return run_lifecycle(config, output, until)
