"""A Ray and a Prefect server for several lifecycles: a driver that was killed needs no new ones."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from xray.deployments.local_ray import running_ray
from xray.deployments.local_services import prefect_server
from xray.deployments.quiet import quiet_environment
from xray_runtime.kernel.processes import start_reaper, tagged

LOGIN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "PREFECT_API_URL", "PREFECT_API_AUTH_STRING")


@dataclass(frozen=True)
class Servers:
    variables: dict[str, str]
    """Their addresses and passwords, as variables of a run."""
    processes: Callable[[], list[psutil.Process]]
    """All processes of the servers, Ray's workers among them."""


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    """Start them, and stop them at the end, also by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    quiet_environment()
    tag = start_reaper()
    with tempfile.TemporaryDirectory() as directory, prefect_server(Path(directory)), running_ray():
        import ray

        variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} | {name: os.environ[name] for name in LOGIN}
        # Workers are forks, and so no children of the raylet.
        yield Servers(variables, lambda: tagged(tag))
