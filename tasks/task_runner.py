"""Ray as the task runner of flows."""

from __future__ import annotations

import os
from typing import Any

from prefect_ray import RayTaskRunner


def task_runner() -> RayTaskRunner[Any]:
    """The task runner for `@flow(task_runner=…)`: the Ray cluster of RAY_ADDRESS, or a private one."""
    return RayTaskRunner(
        address=os.environ.get("RAY_ADDRESS"),
        init_kwargs={"log_to_driver": False, "logging_level": "ERROR", "namespace": "xray"},
    )
