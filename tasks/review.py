"""Ask a person whether a stage shall continue: the flow run pauses, with a form on its page.

The task keeps its models and devices, so that the next iteration begins as soon as the person answers.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from typing import Literal

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from pydantic import Field

from xray.tasks.progress import StageProgress, artifact_key
from xray_runtime.kernel.graph.kind import Answer
from xray_runtime.kernel.store.identity import digest

log = logging.getLogger(__name__)

ANSWER_SECONDS = 7 * 24 * 3600
"""Time for a person to answer."""
POLL_SECONDS = 2


class Review(RunInput):
    """A person's answer."""

    decision: Literal["go on", "end"]
    name: str = Field(min_length=1, description="Your name; it is recorded, not checked.")
    note: str = Field(min_length=1, description="Your reason; it is recorded in the checkpoint.")


def ask_person(stage: str, question: str, progress: StageProgress) -> Answer | None:
    """Pause the flow run until somebody answers `question` (Markdown) on its page; None if nobody does.

    Raises:
        StageInterruptedError: the run was asked to stop meanwhile.
    """
    create_markdown_artifact(question, key=f"xray-{artifact_key(stage)}-review", description=f"{stage} asks")
    answers: list[Review | BaseException] = []
    stopped = threading.Event()

    def pause() -> None:
        form, refused_until = Review.with_initial_data(description=question), time.monotonic() + ANSWER_SECONDS
        # Each question needs its own key, also when a resumed run repeats it: the process that waited is gone.
        key = digest({"stage": stage, "asked": question, "since": _running_since()})[:16]
        while not answers and not stopped.is_set():
            try:
                answers.append(
                    pause_flow_run(wait_for_input=form, timeout=ANSWER_SECONDS, poll_interval=POLL_SECONDS, key=key)
                )
            except RuntimeError as error:
                # Another stage is asking: a run can only pause for one question at a time.
                if time.monotonic() > refused_until:
                    answers.append(error)
                stopped.wait(POLL_SECONDS)
            except BaseException as error:
                answers.append(error)

    # In a thread with this flow run's context, so that the stage can report progress and be stopped.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(pause,), daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            progress(stage, 0, 0, "", "waiting for a person to answer on Prefect's page")
            progress.raise_if_stopped()
            thread.join(POLL_SECONDS)
    finally:
        stopped.set()
    answer = answers[0]
    if isinstance(answer, FlowPauseTimeout):
        log.warning("%s: no one answered in %d days", stage, ANSWER_SECONDS // (24 * 3600))
        return None
    if isinstance(answer, BaseException):
        raise answer
    return Answer(answer.decision == "go on", answer.name, answer.note)


def _running_since() -> str:
    context = FlowRunContext.get()
    state = context.flow_run.state if context is not None and context.flow_run is not None else None
    return str(state.id) if state is not None else ""
