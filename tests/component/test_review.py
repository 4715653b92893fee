"""A stage's question on Prefect's page: the flow run pauses until somebody answers, or the run is asked to stop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client

from tests.waiting import wait_until
from xray.tasks.prefect_run import show
from xray.tasks.review import ask_person
from xray_runtime.kernel.errors import StageInterruptedError
from xray_runtime.kernel.graph.kind import Answer

QUESTION = "**ppo-1** may be learning to please its reward alone:\n\n- replies went from 2.5 to 5.5 tokens"
SECONDS = 240


class Progress:
    """What a stage shows while it waits; asked to stop once `stopped` is set."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.stopped = threading.Event()

    def __call__(self, name: str, done: int, total: int, unit: str, note: str) -> None:
        self.notes.append(note)

    def raise_if_stopped(self) -> None:
        if self.stopped.is_set():
            raise StageInterruptedError("stopped while waiting")


@task
def stage(progress: Any) -> Answer | None:
    return ask_person("ppo-1", QUESTION, progress)


@flow
def training(progress: Any) -> Answer | None:
    return stage.submit(progress).result()


def paused_run() -> Any:
    """The flow run that waits."""
    with get_client(sync_client=True) as client:

        def paused() -> list[Any]:
            return [run for run in client.read_flow_runs() if run.state is not None and run.state.is_paused()]

        return wait_until(paused, seconds=SECONDS, why="no flow run pauses", pause_s=0.3)[0]


@pytest.mark.parametrize(("decision", "goes_on"), [("go on", True), ("end", False)])
def test_a_person_answers_on_the_page(prefect: str, decision: str, goes_on: bool) -> None:
    progress, found = Progress(), []
    thread = threading.Thread(target=lambda: found.append(training(progress)))
    thread.start()
    run = paused_run()
    with get_client(sync_client=True) as client:
        nameless = client.resume_flow_run(run.id, run_input={"decision": decision, "name": "", "note": "x"})
        assert nameless.status.value == "REJECT"
        [artifact] = [a for a in client.read_artifacts() if a.flow_run_id == run.id and a.key]
        assert artifact.data == QUESTION
        client.resume_flow_run(run.id, run_input={"decision": decision, "name": "Ada", "note": "as we want it"})
    thread.join(SECONDS)
    assert found == [Answer(goes_on, "Ada", "as we want it")]
    assert any("waiting for a person" in note for note in progress.notes)


def test_who_stops_the_run_need_not_answer(prefect: str) -> None:
    progress, found = Progress(), []

    def run() -> None:
        try:
            training(progress)
        except StageInterruptedError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    paused_run()
    progress.stopped.set()
    thread.join(SECONDS)
    assert len(found) == 1


@flow
def showing() -> None:
    show("sft", "1/2 steps", "at work")
    show("sft", "loss 4.5 → 3.9", "done")


def test_an_artifact_that_is_shown_again_is_the_same_one(prefect: str) -> None:
    showing()
    with get_client(sync_client=True) as client:
        (found,) = [artifact for artifact in client.read_artifacts() if artifact.key == "sft"]
    assert (found.description, found.data) == ("loss 4.5 → 3.9", "done")
