"""Audit and promotion as deployments of a real Prefect server, answered through its API as its pages would.

The runs are in this process, as a runner makes them in one of their own (`tests/e2e/test_up.py`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import Flow, flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.states import Completed, Running, State

from tests.message_texts import Messages
from tests.unit.trust.synthetic import NAME, Lifecycle, decided
from tests.waiting import wait_until
from xray.flows.audit import audit as audit_flow
from xray.flows.promote import promote as promote_flow
from xray.tasks.prefect_run import crash_lost_flow_run
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.trust.audit.checkpoints import audit

EVENT_SECONDS = 60.0


@pytest.fixture(scope="module")
def client(prefect: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as found:
        yield found


def start(client: SyncPrefectClient, flow: Flow[..., Any], **parameters: Any) -> tuple[UUID, State[Any]]:
    """A run of the flow's deployment: its id, and its state once it ended or waits for a person."""
    deployment = client.create_deployment(client.create_flow(flow), flow.name)
    run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
    return run.id, go_on(client, flow, run.id)


def go_on(client: SyncPrefectClient, flow: Flow[..., Any], run: UUID) -> State[Any]:
    with contextlib.suppress(Pause):  # at which its process ends
        run_flow(flow, client.read_flow_run(run), return_type="state")
    state = client.read_flow_run(run).state
    assert state is not None
    return state


def artifacts(client: SyncPrefectClient, run: UUID) -> list[str]:
    # Without a key: results that Prefect kept.
    return [str(each.data) for each in client.read_artifacts() if each.flow_run_id == run and each.key]


def events(url: str, name: str) -> list[dict[str, Any]]:
    """At least one, which arrives by itself."""
    query = {"filter": {"event": {"name": [name]}}}
    found: list[dict[str, Any]] = wait_until(
        lambda: httpx.post(f"{url}/events/filter", json=query).json()["events"], seconds=EVENT_SECONDS, why=name
    )
    return found


def test_a_person_decides_on_prefects_page(client: SyncPrefectClient, tmp_path: Path, message_texts: Messages) -> None:
    """…also about a candidate that is changed after it was audited: resumed, the flow audits again."""
    Lifecycle(tmp_path / "yes").whole()
    outputs = {name: tmp_path / name for name in ("yes", "changed")}
    shutil.copytree(outputs["yes"], outputs["changed"])
    runs = {}
    for name, output in outputs.items():
        parameters = {"output": str(output), "name": NAME, "gates": {"min_win_rate": 0.3}}
        runs[name], state = start(client, promote_flow, **parameters)
        assert state.name == "Suspended", state.message
    assert [d["action"] for output in outputs.values() for d in decided(output)] == ["register"] * 2

    changed = next(outputs["changed"].glob("checkpoints/sft-*/model.safetensors"))
    changed.write_bytes(changed.read_bytes()[::-1])
    nameless = client.resume_flow_run(runs["yes"], run_input={"approve": True, "name": "", "note": "x"})
    assert nameless.status.value == "REJECT"
    final = {}
    for name, run in runs.items():
        answer = {"approve": True, "name": "Ada", "note": f"she says {name}"}
        assert client.resume_flow_run(run, run_input=answer).status.value == "ACCEPT"
        final[name] = go_on(client, promote_flow, run)
    assert {name: s.name for name, s in final.items()} == {"yes": "Completed", "changed": "Failed"}
    message_texts.check(final["changed"].message or "")

    last = {name: decided(output)[-1] for name, output in outputs.items()}
    assert {name: d["action"] for name, d in last.items()} == {"yes": "promote", "changed": "register"}
    assert (last["yes"]["by"], last["yes"]["note"]) == ("Ada", "she says yes")
    assert last["yes"]["gates"][0]["name"] == "min_win_rate"
    assert audit(open_lineage_store(outputs["yes"], None)).is_sound
    assert any("Ada promoted it" in text for text in artifacts(client, runs["yes"]))
    assert any("is not promoted" in text for text in artifacts(client, runs["changed"]))


def test_an_audit_that_finds_something_says_so_everywhere(
    client: SyncPrefectClient, prefect: str, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    Lifecycle(whole).whole()
    shutil.copytree(whole, broken)
    next(broken.glob("checkpoints/sft-*/model.safetensors")).write_bytes(b"other")
    runs = {output.name: start(client, audit_flow, output=str(output)) for output in (whole, broken)}
    assert {name: state.name for name, (_, state) in runs.items()} == {"whole": "Completed", "broken": "Failed"}
    assert artifacts(client, runs["whole"][0])[0].startswith("**sound**")
    assert "| broken | file-changed | sft" in artifacts(client, runs["broken"][0])[0]
    (event,) = events(prefect, "xray.audit.broken")
    assert event["resource"]["prefect.resource.name"] == "broken"
    assert event["payload"]["findings"][0]["code"] == "file-changed"


def test_only_what_was_lost_is_marked_as_lost(client: SyncPrefectClient) -> None:
    """A flow run that is retried finds the task runs of its own lost attempt, and must not take itself for lost."""

    @flow(name="of-a-lost-process")
    def nothing() -> None:
        """Never run."""

    @task
    def work() -> None:
        """Never run."""

    run = client.create_flow_run(nothing, state=Running())
    tasks = [client.create_task_run(work, run.id, f"{n}", state=s) for n, s in enumerate((Running(), Completed()))]

    def states() -> list[str]:
        found = [client.read_flow_run(run.id).state, *(client.read_task_run(t.id).state for t in tasks)]
        return [s.name for s in found if s is not None]

    crash_lost_flow_run(str(run.id), str(run.id))
    assert states() == ["Running", "Crashed", "Completed"]
    crash_lost_flow_run(str(run.id), str(uuid4()))
    assert states() == ["Crashed", "Crashed", "Completed"]
    crash_lost_flow_run(str(uuid4()), None)
