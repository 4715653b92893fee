"""The current flow: its parameters, its trigger and its page."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from typing import Any

from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from pydantic import TypeAdapter

from xray_runtime.credentials import strip_credentials

PAGE = "prefect.flow_run"
"""Tag with the address of the flow run's page, if the server has a web interface."""


def prefect_tags() -> dict[str, str]:
    """Tags that link an MLflow run to this flow run: its id and, if the server has a web interface, its page."""
    settings = get_current_settings()
    if not flow_run.id:
        return {}
    pages = settings.ui_url if settings.server.ui.enabled else None
    page = {PAGE: f"{strip_credentials(pages)}/runs/flow-run/{flow_run.id}"} if pages else {}
    return {"prefect.flow_run_id": flow_run.id} | page


def trigger_of_run() -> tuple[str | None, dict[str, str]]:
    """Id of this flow run, and its trigger: a schedule, a deployment (its page, the API), or a command."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None:
        return None, {"kind": "command", "by": getpass.getuser()}
    kind = "schedule" if run.auto_scheduled else "deployment" if run.deployment_id else "command"
    by = run.created_by.display_value if run.created_by and run.created_by.display_value else getpass.getuser()
    return str(run.id), {"kind": kind, "by": by} | ({"deployment": str(run.deployment_id)} if run.deployment_id else {})


def flow_parameters() -> dict[str, Any]:
    """Name and parameters of the current flow as JSON; {} outside of a flow."""
    context = FlowRunContext.get()
    if context is None or context.flow is None:
        return {}
    parameters: Mapping[str, Any] = context.parameters or {}
    values = TypeAdapter(dict[str, Any]).dump_python(dict(parameters), mode="json", fallback=repr)
    return {"flow": context.flow.name, **values}
