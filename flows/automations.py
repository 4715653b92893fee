"""`xray automations`: what a Prefect server should do by itself about lifecycles.

A flow run whose driver and workers were killed together would stay Running for ever. Lifecycles send a heartbeat; where
it stops without a final state, the automation marks the run Crashed; retrying it in the UI goes on from its snapshot.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.automations import Automation, EventTrigger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import Posture

NAME = "X-ray: a flow run whose process is gone has crashed"
WITHIN = timedelta(seconds=90)
HEARTBEAT = "prefect.flow-run.heartbeat"
FINAL = ("Completed", "Failed", "Cancelled", "Crashed")


def crashed_without_heartbeat() -> Automation:
    """The automation, not yet installed."""
    return Automation(
        name=NAME,
        description=f"No heartbeat for {WITHIN.total_seconds():.0f} s and no final state: the run is marked Crashed.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *(f"prefect.flow-run.{state}" for state in FINAL)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
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


def install() -> bool:
    """Install it on the server of PREFECT_API_URL; returns whether it was new. Safe to repeat."""
    with get_client(sync_client=True) as client:
        if client.read_automations_by_name(NAME):
            return False
    crashed_without_heartbeat().create()
    return True
