"""This run's page in Prefect, and the states of runs whose process is gone."""

from __future__ import annotations

import contextlib
import logging
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

log = logging.getLogger(__name__)

MESSAGE = "Its process was lost; another run of the same lifecycle continues from its results."


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
