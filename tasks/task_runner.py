"""Ray as the task runner of flows."""

from __future__ import annotations

import os
from typing import Any

from prefect.context import refresh_global_settings_context
from prefect_ray import RayTaskRunner

SERVER_START = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
"""Seconds that a flow which is called in a script waits for the server that Prefect starts for it."""


def task_runner() -> RayTaskRunner[Any]:
    """The task runner for `@flow(task_runner=…)`: the Ray cluster of RAY_ADDRESS, or a private one."""
    # Prefect's own 20 s are too few on a busy machine, and it has read its settings when it was imported.
    if SERVER_START not in os.environ:
        os.environ[SERVER_START] = "300"
        refresh_global_settings_context()
    return RayTaskRunner(
        address=os.environ.get("RAY_ADDRESS"),
        init_kwargs={"log_to_driver": False, "logging_level": "ERROR", "namespace": "xray"},
    )
