"""`xray automations`: Prefect's automations, on a server of your own."""

from __future__ import annotations

import os

from xray_runtime.kernel.config.validation import ConfigError

PANEL = "Servers"


def command() -> None:
    """Install automations on the Prefect server at PREFECT_API_URL: mark lost runs Crashed, notify people."""
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError("PREFECT_API_URL: is not set; set it to the address of a Prefect server")
    from xray.deployments.automations import install

    print("\n".join(f"installed: {name}" for name in install()) or "nothing to install: all are up to date")
