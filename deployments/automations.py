"""Automations of a Prefect server for X-ray's runs, installed by `xray automations` and `xray up`.

A flow run whose driver and workers were killed together would stay Running for ever. Lifecycles send a heartbeat; if it
stops during a run, the run is marked Crashed, and a retry on its page goes on from its snapshot. A run that is late
because another one has its queue says so. Two more notify people: a run failed (an audit that found something too),
a candidate waits for approval. They post {"text": …}, one sentence and a link, to the address in XRAY_NOTIFY_URL, as
chat services take it; without one they only show as events.
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

from xray.deployments.presets import NO_HEARTBEAT, QUEUE, SUSPENDED

PREFIX = "X-ray: "
WITHIN = timedelta(seconds=90)
HEARTBEAT = "prefect.flow-run.heartbeat"
WITHOUT_PROCESS = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Resuming")
"""States of a flow run that nobody sends heartbeats for."""
REPEATS = timedelta(seconds=60)
"""Prefect's worker, its runner and the heartbeat can all report one crash: within this time it is one."""
MAX_MESSAGE = 300
WAITING = "Waiting for another run"
NOTIFY_URL = "XRAY_NOTIFY_URL"
BLOCK = "xray"
Labels = dict[str, str | list[str]]
ANY_RUN: Labels = {"prefect.resource.id": "prefect.flow-run.*"}


def crashed_without_heartbeat() -> Automation:
    """The automation that marks such a run Crashed, not yet installed."""
    return Automation(
        name=f"{PREFIX}a flow run whose process is gone has crashed",
        description=f"No heartbeat for {WITHIN.total_seconds():.0f} s, neither over, suspended nor resumed: Crashed.",
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
        actions=[ChangeFlowRunState(name=None, state=StateType.CRASHED, message=NO_HEARTBEAT, force=False)],
    )


def waiting_in_queue() -> Automation:
    """The automation that makes a late run of the queue say what it waits for, not yet installed."""
    return Automation(
        name=f"{PREFIX}a run that waits for another says so",
        description=f"The queue {QUEUE} takes one run at a time; the next is {WAITING!r} instead of Late.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Late"},
            match=ANY_RUN,
            match_related={"prefect.resource.role": "work-queue", "prefect.resource.name": QUEUE},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            ChangeFlowRunState(
                name=WAITING,
                state=StateType.SCHEDULED,
                message=f"The queue {QUEUE} takes one run at a time: this one begins when those before it have ended. "
                "`xray status` shows them.",
                force=False,
            )
        ],
    )


def notifications(block_id: Any | None) -> list[Automation]:
    """The automations that notify people through the notification block; with None they only leave an event."""
    message = "((flow_run.state.message or '')|string).splitlines()|first|default('', true)"
    why = f"{{{{ {message}|replace('Flow run encountered an exception: ', '')|truncate({MAX_MESSAGE}) }}}}"
    link = "{{ flow_run|ui_url }}"
    failed = f"{{{{ flow_run.name }}}} {{{{ flow_run.state.name|lower }}}}: {why} {link}"
    # A promotion that goes on by itself waits for nobody.
    not_ours = ANY_RUN | {"prefect.state-message": f"!{SUSPENDED}*"}
    promotion: Labels = {"prefect.resource.role": "flow", "prefect.resource.name": "promote"}
    kinds: list[tuple[str, set[str], Labels, Labels, timedelta, str]] = [
        ("a run failed", {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}, ANY_RUN, {}, REPEATS, failed),
        (
            "a candidate waits for approval",
            {"prefect.flow-run.Suspended"},
            not_ours,
            promotion,
            timedelta(0),
            f"{{{{ flow_run.name }}}} waits for approval: {link}",
        ),
    ]
    return [
        Automation(
            name=PREFIX + name,
            description=f"Posts a sentence to {NOTIFY_URL}."
            if block_id
            else f"{NOTIFY_URL} was not set: no notification is sent.",
            trigger=EventTrigger(
                expect=events,
                match=match,
                match_related=related,
                for_each={"prefect.resource.id"},
                posture=Posture.Reactive,
                threshold=1,
                within=within,
            ),
            actions=[
                SendNotification(block_document_id=block_id, subject=PREFIX + name, body=body)
                if block_id
                else DoNothing()
            ],
        )
        for name, events, match, related, within, body in kinds
    ]


def install() -> list[str]:
    """Install or update all of them on the server of PREFECT_API_URL; returns the names of those changed.

    One that is up to date is left alone, switched on or off. One of an earlier X-ray that is none any more goes.
    """
    wanted = [crashed_without_heartbeat(), waiting_in_queue(), *notifications(_block())]
    names, changed = {each.name for each in wanted}, []
    with get_client(sync_client=True) as client:
        for automation in client.read_automations():
            if automation.name.startswith(PREFIX) and automation.name not in names:
                client.delete_automation(automation.id)
        for each in wanted:
            found = client.read_automations_by_name(each.name)
            if found and found[0].description == each.description:
                continue
            for old in found:
                client.delete_automation(old.id)
            each.create()
            changed.append(each.name)
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
        json_data={"text": "{{body}}"},
        headers=None,
        cookies=None,
        secrets=SecretDict({"address": url}),
    )
