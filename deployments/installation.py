"""Install work pool, queue, deployments and automations on the Prefect server of `xray up`. Safe to repeat.

A deployment is only replaced when its preset, its form or an address changed, so that edits on its page stay.

The form of a run on Prefect's page has the fields people change first; all others are behind "Use JSON input". The page
shows every field in `properties`, but the server also validates `patternProperties`. So the other fields move there:
the page keeps their values, and wrong ones are still refused.
"""

from __future__ import annotations

import os
import re
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from xray.deployments.automations import install as install_automations
from xray.deployments.names import POOL, QUEUE
from xray.deployments.presets import VARIABLES, deployments
from xray.flows.search import SearchConfig
from xray_runtime.kernel.store.identity import digest
from xray_runtime.methods.lifecycle import LifecycleConfig

FIRST = {
    "LifecycleConfig": ("project", "seed", "data", "base", "sft", "ppo", "evaluate"),
    "DataConfig": ("source", "max_conversations"),
    "SFTConfig": ("steps",),
    "PPOSection": ("stages",),
    "PPOStageConfig": ("iterations", "lr", "kl"),
    "KLConfig": ("coef",),
    "EvaluateSection": ("num_prompts",),
}
"""Section of the config → its fields in the form, in order."""
HINT = "The fields people change first. For all others: the menu ⋮ → Use JSON input."


def main() -> None:
    """Install everything on the server of PREFECT_API_URL."""
    values = {name: os.environ[name] for name in VARIABLES}
    with get_client(sync_client=True) as client:
        _make_pool(client)
        deployed = install_deployments(client, values)
    print(f"deployed: {deployed}; automations: {install_automations()}")


def install_deployments(client: SyncPrefectClient, values: dict[str, str]) -> list[str]:
    """Create or replace the deployments that are missing or outdated; returns their names."""
    existing = {deployment.name: deployment.version for deployment in client.read_deployments()}
    forms = [FIRST, *(model.model_json_schema() for model in (LifecycleConfig, SearchConfig))]
    written = []
    for preset in deployments(values):
        version = digest({"preset": preset, "forms": forms})[:12]
        if existing.get(preset["name"]) != version:
            _write(client, preset, version)
            written.append(preset["name"])
    return written


def _write(client: SyncPrefectClient, preset: dict[str, Any], version: str) -> None:
    flow: Flow[Any, Any] = load_flow_from_entrypoint(preset["entrypoint"])
    limit, pool = preset.get("concurrency_limit"), preset["work_pool"]
    client.create_deployment(
        client.create_flow(flow),
        preset["name"],
        version=version,
        description=preset["description"],
        entrypoint=preset["entrypoint"],
        tags=preset["tags"],
        parameters=preset["parameters"],
        parameter_openapi_schema=with_first_fields(parameter_schema(flow).model_dump(exclude_unset=True)),
        enforce_parameter_schema=True,
        work_pool_name=pool["name"],
        work_queue_name=pool.get("work_queue_name"),
        job_variables=pool["job_variables"],
        pull_steps=[],
        concurrency_limit=limit and limit["limit"],
        concurrency_options=limit and ConcurrencyOptions(collision_strategy=limit["collision_strategy"]),
        schedules=[
            DeploymentScheduleCreate(
                slug=entry["slug"], schedule=CronSchedule(cron=entry["cron"], timezone=entry["timezone"]), active=True
            )
            for entry in preset.get("schedules", [])
        ],
    )


def with_first_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a flow's parameters with only the fields of FIRST in `properties`."""
    sections = schema.get("definitions", {})
    folded = {name: _fold(section, FIRST[name]) if name in FIRST else section for name, section in sections.items()}
    if "LifecycleConfig" in folded:
        folded["LifecycleConfig"]["description"] = HINT
    return schema | {"definitions": folded}


def _fold(section: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    fields = section["properties"]
    shown = {name: fields[name] | {"title": name, "position": position} for position, name in enumerate(first)}
    others = {f"^{re.escape(name)}$": field for name, field in fields.items() if name not in first}
    return section | {"properties": shown, "patternProperties": others}


def _make_pool(client: SyncPrefectClient) -> None:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", description="Runs of `xray up`."))
    try:
        client.read_work_queue_by_name(QUEUE, work_pool_name=POOL)
    except ObjectNotFound:
        text = "One at a time: lifecycles and searches. Other runs do not wait for them."
        client.create_work_queue(QUEUE, work_pool_name=POOL, description=text, concurrency_limit=1)


if __name__ == "__main__":
    main()
