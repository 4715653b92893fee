"""Check before a run on a cluster that its parts can reach each other."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from xray_runtime.config.validation import ConfigError
from xray_runtime.credentials import strip_credentials

SERVERS = {"PREFECT_API_URL": "Prefect server", "MLFLOW_TRACKING_URI": "MLflow server"}


def check_ray_address(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if RAY_ADDRESS uses Ray's client: the driver of a run must be a process of a node."""
    address = environment.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS: {address!r} is not allowed: must be HOST:PORT of a cluster this machine is a node of "
            "(`ray start --address=HOST:PORT --num-cpus=0` joins it without giving it any CPU)"
        )


def check_servers(machines: set[str], environment: Mapping[str, str] = os.environ) -> None:
    """Check that stages, which run on any node, can reach Prefect and MLflow.

    Args:
        machines: addresses of the machines of all nodes.

    Raises:
        ConfigError: there are several machines, and only this one can reach a server.
    """
    if len(machines) < 2:
        return
    for name, what in SERVERS.items():
        address = environment.get(name, "")
        host = urlsplit(address).hostname
        if host is None or is_loopback(host):
            raise ConfigError(
                f"{name}: {strip_credentials(address) or 'unset'!r} is not allowed on a cluster of {len(machines)} "
                f"machines: must be the address of a {what} that all of them can reach, as http://HOST:PORT"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. Of names, only localhost is known to be such."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
