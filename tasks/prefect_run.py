"""This run in Prefect: its parameters, trigger and page, and the states of runs whose process is gone."""

from __future__ import annotations

import contextlib
import getpass
import logging
from typing import Any
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Crashed
from pydantic import TypeAdapter

from xray_runtime.kernel.credentials import strip_credentials

log = logging.getLogger(__name__)

PAGE = "prefect.flow_run"
"""Tag with the address of the flow run's page, if the server has a web interface."""
MESSAGE = "Its process was lost; another run of the same lifecycle continues from its results."


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
    values = TypeAdapter(dict[str, Any]).dump_python(context.parameters or {}, mode="json", fallback=repr)
    return {"flow": context.flow.name, **values}


def show(key: str, title: str, text: str) -> None:
    """Create the artifact `key` of this flow run with the Markdown `text`, or replace its text if it is there."""
    with get_client(sync_client=True) as client:
        artifacts = []
        if flow_run.id:
            this_run = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run.id)]))
            same = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
            artifacts = client.read_artifacts(artifact_filter=same, flow_run_filter=this_run)
        if artifacts:
            client.update_artifact(artifacts[0].id, ArtifactUpdate(data=text, description=title))
        else:
            create_markdown_artifact(text, key=key, description=title)


def crash_lost_task_run(task_run_id: UUID) -> None:
    """Set a task run Crashed that lost its worker, which Prefect does not notice."""
    with get_client(sync_client=True) as client, contextlib.suppress(ObjectNotFound):
        state = client.read_task_run(task_run_id).state
        if state is None or not state.is_final():
            client.set_task_run_state(task_run_id, Crashed(message="Its Ray worker was lost."), force=True)


def crash_lost_flow_run(flow_run_id: str | None, present: str | None) -> None:
    """Set the flow run and its task runs Crashed unless they have ended.

    Args:
        present: the current flow run. If it is the same one, retried, only its task runs are set.
    """
    if flow_run_id is None:
        return
    with get_client(sync_client=True) as client:
        try:
            lost = client.read_flow_run(UUID(flow_run_id))
        except ObjectNotFound:
            return
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[lost.id])))
        for task in tasks:
            if task.state is None or not task.state.is_final():
                client.set_task_run_state(task.id, Crashed(message=MESSAGE), force=True)
        if flow_run_id != present and (lost.state is None or not lost.state.is_final()):
            client.set_flow_run_state(lost.id, Crashed(message=MESSAGE), force=True)
            log.info("flow run %s was lost; it is marked as crashed", lost.name)
