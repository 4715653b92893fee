"""What `xray up` puts on its Prefect server: work pool, queues, deployments, automations.

Safe to repeat. A deployment is written anew only when its file, its form or an address changed, so that what was edited
on its page, or a schedule switched off there, stays.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound

from xray.deployments.automations import install as install_automations
from xray.deployments.servers import POOL
from xray.flows.search import SearchConfig
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.store.identity import digest

FILE = Path(__file__).parents[1] / "deployments" / "prefect.yaml"
VERSION = "XRAY_DEPLOYED"
VARIABLES = ("XRAY_HOME", "RAY_ADDRESS", "MLFLOW_TRACKING_URI", "XRAY_TIMEZONE")
QUEUES = {"ray": 1}
"""Work queue → how many of its runs may be on at a time."""


def main() -> None:
    """Install everything on the server of PREFECT_API_URL."""
    with get_client(sync_client=True) as client:
        _make_pool(client)
        stale = _stale(client)
    if stale:
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--prefect-file", str(FILE)]
        subprocess.run([*command, *(part for name in stale for part in ("--name", name))], check=True)
    changed = install_automations()
    print(f"deployed: {stale}; automations: {changed}")


def _make_pool(client: SyncPrefectClient) -> None:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", description="What `xray up` runs."))
    for name, limit in QUEUES.items():
        try:
            client.read_work_queue_by_name(name, work_pool_name=POOL)
        except ObjectNotFound:
            client.create_work_queue(name, work_pool_name=POOL, concurrency_limit=limit)


def _stale(client: SyncPrefectClient) -> list[str]:
    """Deployments that are missing or of another version; the version goes into the environment, for the file."""
    text = FILE.read_text(encoding="utf-8")
    forms = [model.model_json_schema() for model in (LifecycleConfig, SearchConfig)]
    version = digest({"file": text, "forms": forms} | {name: os.environ.get(name) for name in VARIABLES})[:12]
    os.environ[VERSION] = version
    there = {deployment.name: deployment.version for deployment in client.read_deployments()}
    wanted = [deployment["name"] for deployment in yaml.safe_load(text)["deployments"]]
    return [name for name in wanted if there.get(name) != version]


if __name__ == "__main__":
    main()
