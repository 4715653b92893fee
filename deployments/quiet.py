"""The environment of X-ray's processes: no telemetry, no chatter of libraries, no passwords in addresses."""

from __future__ import annotations

import os

from xray_runtime.kernel.credentials import hide_logins
from xray_runtime.kernel.network import exempt_loopback
from xray_runtime.kernel.processes import QUIET


def quiet_environment() -> None:
    """Switch off telemetry and third-party chatter, remove passwords from addresses, use no proxy for loopback.

    To be called before Prefect, Ray or MLflow are imported.
    """
    hide_logins()
    exempt_loopback()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
