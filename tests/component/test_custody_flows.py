"""Audit and promotion as deployments of a real Prefect server, answered through its API as its pages would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Running

from tests.unit.trust.synthetic import NAME, Lifecycle, decided
from xray.deployments.local_services import prefect_server
from xray.tasks.prefect_run import crash_lost_flow_run
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.trust.audit.checkpoints import audit

SERVE = """
from prefect import serve
from xray.flows.audit import audit
from xray.flows.promote import promote
serve(*(flow.to_deployment(flow.name) for flow in (audit, promote)), limit=8)
"""
ROOT = Path(__file__).parents[2]
LONG = 180.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the deployments, and a process that serves them."""
    home = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_RUNNER_POLL_FREQUENCY", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("PREFECT_API_URL", raising=False)
        with prefect_server(home), (home / "serve.log").open("wb") as log:
            url, login = os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"]
            runner = subprocess.Popen([sys.executable, "-c", SERVE], cwd=ROOT, stdout=log, stderr=log)
            try:
                with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: login}):
                    until(lambda: deployed("promote/promote"), f"see {log.name}")
                    yield url
            finally:
                runner.terminate()
                runner.wait(30)


def asked(address: str, query: dict[str, Any]) -> Any:
    """What the server answers to whoever has its password."""
    user, _, password = os.environ["PREFECT_API_AUTH_STRING"].partition(":")
    return httpx.post(address, json=query, auth=(user, password)).json()


def until(condition: Callable[[], Any], why: str) -> Any:
    deadline = time.monotonic() + LONG
    while not (found := condition()):
        assert time.monotonic() < deadline, why
        time.sleep(0.3)
    return found


def deployed(name: str) -> Any:
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            return client.read_deployment_by_name(name)
        except ObjectNotFound:
            return None


def start(deployment: str, /, **parameters: Any) -> Any:
    with get_client(sync_client=True) as client:
        return client.create_flow_run_from_deployment(deployed(deployment).id, parameters=parameters).id


def state(run: Any) -> Any:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run).state


def ended(run: Any) -> Any:
    return until(lambda: (s := state(run)).is_final() and s, f"flow run {run} does not end")


def suspended(run: Any) -> None:
    until(lambda: (s := state(run)).name == "Suspended" or s.is_final(), f"{run} does not ask")
    assert state(run).name == "Suspended", state(run).message


def artifacts(url: str, run: Any) -> list[str]:
    query = {"artifacts": {"flow_run_id": {"any_": [str(run)]}}}
    # Without a key: results that Prefect kept.
    return [str(a["data"]) for a in asked(f"{url}/artifacts/filter", query) if a["key"]]


def events(url: str, name: str) -> list[dict[str, Any]]:
    query = {"filter": {"event": {"name": [name]}}}
    found: list[dict[str, Any]] = asked(f"{url}/events/filter", query)["events"]
    return found


@pytest.mark.timeout(900)
def test_a_person_decides_on_prefects_page(server: str, tmp_path: Path) -> None:
    """…also about a candidate that is changed after it was audited: resumed, the flow audits again."""
    Lifecycle(tmp_path / "yes").whole()
    outputs = {name: tmp_path / name for name in ("yes", "changed")}
    shutil.copytree(outputs["yes"], outputs["changed"])
    gates = {"min_win_rate": 0.3}
    runs = {
        name: start("promote/promote", output=str(output), name=NAME, gates=gates) for name, output in outputs.items()
    }
    for run in runs.values():
        suspended(run)
    assert [d["action"] for output in outputs.values() for d in decided(output)] == ["register"] * 2

    changed = next(outputs["changed"].glob("checkpoints/sft-*/model.safetensors"))
    changed.write_bytes(changed.read_bytes()[::-1])
    with get_client(sync_client=True) as client:
        nameless = client.resume_flow_run(runs["yes"], run_input={"approve": True, "name": "", "note": "x"})
        assert nameless.status.value == "REJECT"
        for name, run in runs.items():
            answer = {"approve": True, "name": "Ada", "note": f"she says {name}"}
            assert client.resume_flow_run(run, run_input=answer).status.value == "ACCEPT"
    final = {name: ended(run) for name, run in runs.items()}
    assert {name: s.name for name, s in final.items()} == {"yes": "Completed", "changed": "Failed"}
    assert "file-changed (sft" in final["changed"].message

    last = {name: decided(output)[-1] for name, output in outputs.items()}
    assert {name: d["action"] for name, d in last.items()} == {"yes": "promote", "changed": "register"}
    assert (last["yes"]["by"], last["yes"]["note"]) == ("Ada", "she says yes")
    assert last["yes"]["gates"][0]["name"] == "min_win_rate"
    assert audit(open_lineage_store(outputs["yes"], None)).is_sound
    assert any("Ada promoted it" in text for text in artifacts(server, runs["yes"]))
    assert any("is not promoted" in text for text in artifacts(server, runs["changed"]))


@pytest.mark.timeout(900)
def test_an_audit_that_finds_something_says_so_everywhere(server: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    Lifecycle(whole).whole()
    shutil.copytree(whole, broken)
    next(broken.glob("checkpoints/sft-*/model.safetensors")).write_bytes(b"other")
    runs = {output.name: start("audit/audit", output=str(output)) for output in (whole, broken)}
    final = {name: ended(run) for name, run in runs.items()}
    assert {name: s.name for name, s in final.items()} == {"whole": "Completed", "broken": "Failed"}, final[
        "whole"
    ].message
    assert artifacts(server, runs["whole"])[0].startswith("**sound**")
    assert "| broken | file-changed | sft" in artifacts(server, runs["broken"])[0]
    (event,) = until(lambda: events(server, "xray.audit.broken"), "no event")
    assert event["resource"]["prefect.resource.name"] == "broken"
    assert event["payload"]["findings"][0]["code"] == "file-changed"


def test_only_what_was_lost_is_marked_as_lost(server: str) -> None:
    """A flow run that is retried finds the task runs of its own lost attempt, and must not take itself for lost."""

    @flow(name="of-a-lost-process")
    def nothing() -> None:
        """Never run."""

    @task
    def work() -> None:
        """Never run."""

    with get_client(sync_client=True) as client:
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
