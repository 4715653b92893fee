"""Ray as the task runner of a user's flows: a Ray that it starts is private and starts as fast as a command's."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Self

import ray
from prefect.context import refresh_global_settings_context
from prefect_ray import RayTaskRunner

from xray.deployments.local_ray import running_ray
from xray.deployments.quiet import quiet_environment
from xray.tasks import task_runner as shipped
from xray_runtime.kernel.processes import QUIET

SERVER_START = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
OF_THE_SERVER = {
    # Prefect's own 20 s are too few on a busy machine.
    SERVER_START: "300",
    **{name: QUIET[name] for name in ("DO_NOT_TRACK", "PREFECT_SERVER_ANALYTICS_ENABLED")},
}
"""Settings of the server that Prefect starts for a flow which a script calls."""


class PrivateRayTaskRunner(RayTaskRunner[Any]):
    """Prefect's, but the Ray that it starts for a flow has a token, and its workers are forked."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self.address is None and not ray.is_initialized():
                quiet_environment()
                stack.enter_context(running_ray())
            super().__enter__()
            self._ray = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            # It keeps the logs of a flow that failed.
            self._ray.__exit__(*error)


def task_runner() -> RayTaskRunner[Any]:
    """The task runner for `@flow(task_runner=…)`: the Ray cluster of RAY_ADDRESS, or a private one."""
    missing = OF_THE_SERVER.keys() - os.environ.keys()
    os.environ |= {name: OF_THE_SERVER[name] for name in missing}
    if missing:
        # Prefect read its settings when it was imported.
        refresh_global_settings_context()
    return shipped.task_runner(PrivateRayTaskRunner)
