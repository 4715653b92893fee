"""Ray as the task runner of flows."""

from __future__ import annotations

import os
from typing import Any

from prefect_ray import RayTaskRunner


def task_runner(kind: type[RayTaskRunner[Any]] = RayTaskRunner) -> RayTaskRunner[Any]:
    """The task runner of flows: the Ray cluster of RAY_ADDRESS, or the one that this process has started."""
    return kind(
        address=os.environ.get("RAY_ADDRESS"),
        init_kwargs={"log_to_driver": False, "logging_level": "ERROR", "namespace": "xray"},
    )
