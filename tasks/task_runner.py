"""Where the tasks of a flow run: Ray."""

from __future__ import annotations

import os
from typing import Any

from prefect_ray import RayTaskRunner


def task_runner() -> RayTaskRunner[Any]:
    """Ray as X-ray uses it, for `@flow(task_runner=…)`: the cluster of RAY_ADDRESS, else one of the run's own."""
    return RayTaskRunner(
        address=os.environ.get("RAY_ADDRESS"),
        init_kwargs={"log_to_driver": False, "logging_level": "ERROR", "namespace": "xray"},
    )
