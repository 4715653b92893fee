"""Schedule a cycle of the flywheel on the Prefect server of PREFECT_API_URL, after a withdrawal."""

from __future__ import annotations

import os
from pathlib import Path

from prefect.client.orchestration import get_client

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import error_summary


def schedule_cycle(output: Path) -> str | None:
    """Start a run of the deployed flow `flywheel` that works in `output`; returns its name.

    None where there is no server, or no such deployment: the next cycle applies the withdrawal then.

    Raises:
        ConfigError: the server does not answer.
    """
    if not os.environ.get("PREFECT_API_URL"):
        return None
    try:
        with get_client(sync_client=True) as client:
            for deployment in client.read_deployments():
                directory = str((deployment.parameters or {}).get("output", ""))
                if (
                    "flywheel" in (deployment.tags or [])
                    and directory
                    and Path(directory).absolute() == output.absolute()
                ):
                    return client.create_flow_run_from_deployment(deployment.id).name
    # Prefect's client raises errors of several libraries.
    except Exception as error:
        raise ConfigError(f"PREFECT_API_URL: no run was scheduled ({error_summary(error)})") from error
    return None
