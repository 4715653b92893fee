"""Automations of a Prefect server for X-ray's runs, installed by `xray automations` and `xray up`.

- A run without heartbeats is marked Crashed: its driver and workers were killed together. A retry on its page continues
  from its snapshot.
- A run that waits for another run in its queue is shown as waiting instead of Late.
- A failed run (a failed audit too) and a candidate that waits for approval notify people: they post {"text": …}, one
  sentence and a link, to XRAY_NOTIFY_URL, as chat services expect. Without that variable they only appear as events.
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

from xray.deployments.names import NO_HEARTBEAT, QUEUE, SUSPENDED

PREFIX = "X-ray: "
WITHIN = timedelta(seconds=90)
HEARTBEAT = "prefect.flow-run.heartbeat"
WITHOUT_PROCESS = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Resuming")
"""States of a flow run in which no process sends heartbeats."""
REPEATS = timedelta(seconds=60)
"""Prefect's worker, its runner and the heartbeat can all report one crash: reports within this time count once."""
MAX_MESSAGE = 300
WAITING = "Waiting for another run"
NOTIFY_URL = "XRAY_NOTIFY_URL"
BLOCK = "xray"
Labels = dict[str, str | list[str]]
ANY_RUN: Labels = {"prefect.resource.id": "prefect.flow-run.*"}


def crashed_without_heartbeat() -> Automation:
    """The automation that marks runs without heartbeats Crashed."""
    return Automation(
        name=f"{PREFIX}mark a flow run Crashed when its process is gone",
        description=f"Marks a run Crashed after {WITHIN.total_seconds():.0f} s without a heartbeat or an end.",
        trigger=_trigger(
            {HEARTBEAT, *(f"prefect.flow-run.{state}" for state in WITHOUT_PROCESS)},
            posture=Posture.Proactive,
            after={HEARTBEAT},
            within=WITHIN,
        ),
        actions=[ChangeFlowRunState(name=None, state=StateType.CRASHED, message=NO_HEARTBEAT, force=False)],
    )


def waiting_in_queue() -> Automation:
    """The automation that renames the state of a run that waits in the queue."""
    return Automation(
        name=f"{PREFIX}show that a run waits for another one",
        description=f"The queue {QUEUE} runs one at a time; the next run is {WAITING!r} instead of Late.",
        trigger=_trigger(
            {"prefect.flow-run.Late"},
            match_related={"prefect.resource.role": "work-queue", "prefect.resource.name": QUEUE},
        ),
        actions=[
            ChangeFlowRunState(
                name=WAITING,
                state=StateType.SCHEDULED,
                message=f"The queue {QUEUE} runs one at a time; `xray status` shows the runs before this one.",
                force=False,
            )
        ],
    )


def notifications(block_id: Any | None) -> list[Automation]:
    """The automations that notify people through the notification block; with None they only record an event."""
    message = "((flow_run.state.message or '')|string).splitlines()|first|default('', true)"
    why = f"{{{{ {message}|replace('Flow run encountered an exception: ', '')|truncate({MAX_MESSAGE}) }}}}"
    link = "{{ flow_run|ui_url }}"
    failed = f"{{{{ flow_run.name }}}} {{{{ flow_run.state.name|lower }}}}: {why} {link}"
    # A promotion that `xray down` suspended does not wait for approval.
    not_ours = ANY_RUN | {"prefect.state-message": f"!{SUSPENDED}*"}
    promotion: Labels = {"prefect.resource.role": "flow", "prefect.resource.name": "promote"}
    waits = f"{{{{ flow_run.name }}}} waits for approval: {link}"

    def notification(name: str, body: str, trigger: EventTrigger) -> Automation:
        post = SendNotification(block_document_id=block_id, subject=PREFIX + name, body=body) if block_id else None
        return Automation(
            name=PREFIX + name,
            description=f"Posts a sentence to {NOTIFY_URL}." if block_id else f"Off: {NOTIFY_URL} is not set.",
            trigger=trigger,
            actions=[post or DoNothing()],
        )

    failures = _trigger({"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}, within=REPEATS)
    approvals = _trigger({"prefect.flow-run.Suspended"}, match=not_ours, match_related=promotion)
    return [
        notification("a run failed", failed, failures),
        notification("a candidate waits for approval", waits, approvals),
    ]


def _trigger(events: set[str], **options: Any) -> EventTrigger:
    """A trigger on `events` of flow runs, evaluated for each run separately."""
    defaults: dict[str, Any] = {"match": ANY_RUN, "posture": Posture.Reactive, "within": timedelta(0)}
    return EventTrigger(expect=events, for_each={"prefect.resource.id"}, threshold=1, **defaults | options)


def install() -> list[str]:
    """Install or update the automations on the server of PREFECT_API_URL; returns the names of those that changed.

    An automation that is up to date stays as it is, switched on or off. Automations of an earlier X-ray are removed.
    """
    url = os.environ.get(NOTIFY_URL)
    block_id = webhook(url).save(BLOCK, overwrite=True) if url else None
    wanted = [crashed_without_heartbeat(), waiting_in_queue(), *notifications(block_id)]
    names, changed = {each.name for each in wanted}, []
    with get_client(sync_client=True) as client:
        for automation in client.read_automations():
            if automation.name.startswith(PREFIX) and automation.name not in names:
                client.delete_automation(automation.id)
        for each in wanted:
            installed = client.read_automations_by_name(each.name)
            if installed and installed[0].description == each.description:
                continue
            for old in installed:
                client.delete_automation(old.id)
            each.create()
            changed.append(each.name)
    return changed


def webhook(url: str) -> CustomWebhookNotificationBlock:
    """A block that posts to `url`. The URL is a secret, which Prefect's pages do not show."""
    return CustomWebhookNotificationBlock(
        name="X-ray",
        url="{{address}}",
        json_data={"text": "{{body}}"},
        headers=None,
        cookies=None,
        secrets=SecretDict({"address": url}),
    )
