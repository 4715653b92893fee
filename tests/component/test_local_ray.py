"""A Ray of a workspace's own, in a process that has imported Ray before."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.conftest import ROOT

SCRIPT = """
import ray
from xray.deployments.local_ray import running_ray

with running_ray():
    print(ray.get(ray.remote(lambda: 6 * 7).remote()))
"""


def test_ray_may_be_imported_before_a_workspace_is_opened() -> None:
    """Ray reads at import whether there is a token; a cluster with one would refuse the process that started it."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["42"], done.stderr[-2000:]
