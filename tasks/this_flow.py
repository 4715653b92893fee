"""The flow run that this process is, as Prefect knows it: parameters, trigger, tags.

A process that has not imported Prefect runs no flow. So a run that only records what is in the store does not take the
seconds of that import.
"""

from __future__ import annotations

import getpass
import sys
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from xray_runtime.kernel.credentials import strip_credentials

if TYPE_CHECKING:
    from prefect.context import FlowRunContext

PAGE = "prefect.flow_run"
"""Tag with the address of the flow run's page, if the server has a web interface."""


def prefect_tags() -> dict[str, str]:
    """Tags that link an MLflow run to this flow run: its id and, if the server has a web interface, its page."""
    if not _has_prefect():
        return {}
    from prefect.runtime import flow_run
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if not flow_run.id:
        return {}
    pages = settings.ui_url if settings.server.ui.enabled else None
    page = {PAGE: f"{strip_credentials(pages)}/runs/flow-run/{flow_run.id}"} if pages else {}
    return {"prefect.flow_run_id": flow_run.id} | page


def trigger_of_run() -> tuple[str | None, dict[str, str]]:
    """Id of this flow run, and its trigger: a schedule, a deployment (its page, the API), or a command."""
    context = _context()
    run = context.flow_run if context is not None else None
    if run is None:
        return None, {"kind": "command", "by": getpass.getuser()}
    kind = "schedule" if run.auto_scheduled else "deployment" if run.deployment_id else "command"
    by = run.created_by.display_value if run.created_by and run.created_by.display_value else getpass.getuser()
    return str(run.id), {"kind": kind, "by": by} | ({"deployment": str(run.deployment_id)} if run.deployment_id else {})


def flow_parameters() -> dict[str, Any]:
    """Name and parameters of the current flow as JSON; {} outside of a flow."""
    context = _context()
    if context is None or context.flow is None:
        return {}
    values = TypeAdapter(dict[str, Any]).dump_python(context.parameters or {}, mode="json", fallback=repr)
    return {"flow": context.flow.name, **values}


def _has_prefect() -> bool:
    return "prefect" in sys.modules


def _context() -> FlowRunContext | None:
    if not _has_prefect():
        return None
    from prefect.context import FlowRunContext

    return FlowRunContext.get()
