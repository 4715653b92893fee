"""Artifacts on a flow run's page in Prefect: one of each key, also after the run was suspended or retried."""

from __future__ import annotations

from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.runtime import flow_run


def show(key: str, title: str, text: str) -> None:
    """Create the artifact `key` of the current flow run with the Markdown `text`, or replace its text."""
    with get_client(sync_client=True) as client:
        found = []
        if flow_run.id:
            run = ArtifactFilterFlowRunId(any_=[UUID(flow_run.id)])
            same = ArtifactFilter(flow_run_id=run, key=ArtifactFilterKey(any_=[key]))
            found = client.read_artifacts(artifact_filter=same)
        if found:
            client.update_artifact(found[0].id, ArtifactUpdate(data=text, description=title))
        else:
            create_markdown_artifact(text, key=key, description=title)
