"""Automations of a Prefect server for X-ray's runs, installed by `xray automations` and `xray up`.

A flow run whose driver and workers were killed together would stay Running for ever. Lifecycles send a heartbeat; if it
stops during a run, the run is marked Crashed, and a retry on its page goes on from its snapshot. Three more notify
people: a run failed, an audit found something, a candidate waits for approval. They post {"text": …} to the address in
XRAY_NOTIFY_URL, as chat services take it; without one they only show as events.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from prefect.automations import Automation, EventTrigger
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, DoNothing, SendNotification
from prefect.events.schemas.automations import Posture
from prefect.types import SecretDict

from xray.flows.audit import BROKEN_EVENT

PREFIX = "X-ray: "
WITHIN = timedelta(seconds=90)
HEARTBEAT = "prefect.flow-run.heartbeat"
WITHOUT_PROCESS = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended")
"""States of a flow run that nobody sends heartbeats for."""
NOTIFY_URL = "XRAY_NOTIFY_URL"
BLOCK = "xray"
ANY_RUN: dict[str, str | list[str]] = {"prefect.resource.id": "prefect.flow-run.*"}


def crashed_without_heartbeat() -> Automation:
    """The automation that marks such a run Crashed, not yet installed."""
    return Automation(
        name=f"{PREFIX}a flow run whose process is gone has crashed",
        description=f"No heartbeat for {WITHIN.total_seconds():.0f} s, though neither finished nor suspended: "
        f"marked Crashed.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            # A candidate may wait for days for approval.
            expect={HEARTBEAT, *(f"prefect.flow-run.{state}" for state in WITHOUT_PROCESS)},
            match=ANY_RUN,
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=WITHIN,
        ),
        actions=[
            ChangeFlowRunState(
                name=None, state=StateType.CRASHED, message="No heartbeat: its process is gone.", force=False
            )
        ],
    )


def notifications(block_id: Any | None) -> list[Automation]:
    """The automations that notify people through the notification block; with None they only leave an event."""
    run = "{{ flow_run.name }} {{ flow_run.state.name }}: {{ flow_run.state.message }}\n{{ flow_run|ui_url }}"
    kinds: list[tuple[str, set[str], dict[str, str | list[str]], dict[str, str | list[str]], str]] = [
        ("a run failed", {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}, ANY_RUN, {}, run),
        (
            "an audit found something",
            {BROKEN_EVENT},
            {},
            {},
            "{{ event.resource.name }}: {{ event.payload.count }} findings, the first: {{ event.payload.findings[0] }}",
        ),
        (
            "a candidate waits for approval",
            {"prefect.flow-run.Suspended"},
            ANY_RUN,
            {"prefect.resource.role": "flow", "prefect.resource.name": "promote"},
            run,
        ),
    ]
    return [
        Automation(
            name=PREFIX + name,
            description=f"Posts to {NOTIFY_URL}." if block_id else f"{NOTIFY_URL} was not set: no one is notified.",
            trigger=EventTrigger(
                expect=events,
                match=match,
                match_related=related,
                for_each={"prefect.resource.id"},
                posture=Posture.Reactive,
                threshold=1,
                within=timedelta(0),
            ),
            actions=[
                SendNotification(block_document_id=block_id, subject=PREFIX + name, body=body)
                if block_id
                else DoNothing()
            ],
        )
        for name, events, match, related, body in kinds
    ]


def install() -> list[str]:
    """Install or update all of them on the server of PREFECT_API_URL; returns the names of those changed.

    One that is up to date is left alone, switched on or off.
    """
    wanted = [crashed_without_heartbeat(), *notifications(_block())]
    changed = []
    with get_client(sync_client=True) as client:
        for automation in wanted:
            found = client.read_automations_by_name(automation.name)
            if found and found[0].description == automation.description:
                continue
            for old in found:
                client.delete_automation(old.id)
            automation.create()
            changed.append(automation.name)
    return changed


def _block() -> Any | None:
    """The id of the notification block for XRAY_NOTIFY_URL."""
    url = os.environ.get(NOTIFY_URL)
    return webhook(url).save(BLOCK, overwrite=True) if url else None


def webhook(url: str) -> CustomWebhookNotificationBlock:
    """A block that posts to `url`, which is a secret (anyone who has it can post) that Prefect's pages do not show."""
    return CustomWebhookNotificationBlock(
        name="X-ray",
        url="{{address}}",
        json_data={"text": "{{subject}}\n{{body}}"},
        headers=None,
        cookies=None,
        secrets=SecretDict({"address": url}),
    )
