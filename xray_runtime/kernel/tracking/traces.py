"""Recorded answers in MLflow: a trace each, assessments on it, and a review queue for those who judge there.

A trace has the id of its answer, so an answer that is written twice is one trace. It holds no name of a person, only
the pseudonym. Labeling sessions of MLflow are for Databricks alone; review queues and label schemas are what MLflow
itself has (experimental since 3.14).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.tracking.mlflow_tracker import Tracker
from xray_runtime.kernel.tracking.registry import open_client

if TYPE_CHECKING:
    from mlflow.entities import Assessment as MlflowAssessment, TraceInfo
    from mlflow.tracing.client import TracingClient

TRACE = "tr-"
"""Begins the id of a trace; the answer's id follows."""
MODEL_TAG = "xray.model"
"""Tag of a trace: sha256 of the model that answered."""
IS_OURS = f"tags.`{MODEL_TAG}` LIKE '%'"
FEEDBACK_KEY = "xray.feedback"
"""Metadata of an assessment: the id of the recorded feedback that it shows."""
PREVIEW_CHARS = 1000
PAGE = 500
MAX_USERS = 10
"""Most people to whom MLflow assigns a queue."""
EXPECTED = ("correction", "better")
"""Signals that say what the answer should have been: expectations of MLflow. The others are its feedback."""


@dataclass(frozen=True)
class ShownAnswer:
    """The contents of the trace of an answer."""

    id: str
    model: str
    """sha256."""
    user: str
    """Pseudonym."""
    at_ms: int
    latency_s: float
    prompt: str
    reply: str
    """Texts for lists of traces."""
    request: Mapping[str, Any]
    answer: Mapping[str, Any]


@dataclass(frozen=True)
class Assessment:
    """A statement about a trace."""

    id: str
    name: str
    value: Any
    comment: str | None
    judge: str
    is_person: bool
    at_ms: int
    """When it was last changed."""
    feedback: str | None
    """See FEEDBACK_KEY."""


@dataclass(frozen=True)
class ShownTrace:
    """The trace of an answer, as MLflow has it now."""

    answer: str
    model: str
    at_ms: int
    assessments: tuple[Assessment, ...]


class AnswerTraces:
    """The recorded answers in one experiment of MLflow.

    The arguments are those of `Tracker`.
    """

    def __init__(self, uri: str, experiment: str, artifact_root: Path | None) -> None:
        from mlflow.tracing.client import TracingClient

        self._experiment_id = Tracker(uri, experiment, artifact_root).experiment_id
        self._traces = TracingClient(uri)

    def read(self) -> dict[str, ShownTrace]:
        """Answer → its trace."""
        return {trace.answer: trace for trace in _read(self._traces, self._experiment_id, IS_OURS)}

    def write(self, answer: ShownAnswer, model_id: str | None) -> None:
        """Write the trace of an answer by the LoggedModel `model_id`; its assessments stay."""
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        # The tag comes last: a trace that has it is whole.
        self._traces.log_spans(self._experiment_id, [_span(answer)])
        metadata = {"mlflow.trace.user": answer.user} | ({"mlflow.modelId": model_id} if model_id else {})
        info = TraceInfo(
            trace_id=TRACE + answer.id,
            trace_location=TraceLocation.from_experiment_id(self._experiment_id),
            request_time=answer.at_ms,
            state=TraceState.OK,
            execution_duration=round(1000 * answer.latency_s),
            client_request_id=answer.id,
            request_preview=answer.prompt[:PREVIEW_CHARS],
            response_preview=answer.reply[:PREVIEW_CHARS],
            trace_metadata=metadata,
            tags={
                "mlflow.traceName": "answer",
                "mlflow.trace.spansLocation": "TRACKING_STORE",
                MODEL_TAG: answer.model,
            },
        )
        self._traces.start_trace(info)

    def assess(self, answer: str, feedback: str, judge: str, signals: Mapping[str, Any]) -> None:
        """Write a recorded feedback (its id) by a judge (their pseudonym) as assessments, one a signal."""
        from mlflow.entities import AssessmentSource, Expectation, Feedback

        for name, value in signals.items():
            kind = Expectation if name in EXPECTED else Feedback
            source = AssessmentSource("HUMAN", judge)
            self._traces.log_assessment(
                TRACE + answer, kind(name=name, value=value, source=source, metadata={FEEDBACK_KEY: feedback})
            )

    def remove(self, answers: Sequence[str]) -> None:
        """Delete traces with all that was said of them."""
        _delete(self._traces, self._experiment_id, [TRACE + answer for answer in answers])

    def remove_assessment(self, answer: str, assessment: str) -> None:
        self._traces.delete_assessment(TRACE + answer, assessment)

    def open_queue(self, name: str, judges: Sequence[str]) -> Queue:
        """The review queue `name`, with a question for each signal; made if there is none."""
        from mlflow.exceptions import MlflowException
        from mlflow.genai import label_schemas, review_queues

        known = {schema.name: schema for schema in label_schemas.list_label_schemas(experiment_id=self._experiment_id)}
        # MLflow asks the newest first.
        for question in reversed(list(_questions())):
            if question["name"] not in known:
                made = label_schemas.create_label_schema(**question, experiment_id=self._experiment_id)
                known[made.name] = made
        try:
            queue = review_queues.get_review_queue(name=name, experiment_id=self._experiment_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            queue = review_queues.create_review_queue(
                name,
                queue_type="custom",
                users=list(judges) if len(judges) <= MAX_USERS else [],
                schema_ids=[known[question["name"]].schema_id for question in _questions()],
                experiment_id=self._experiment_id,
            )
        return Queue(queue.queue_id)


class Queue:
    """A review queue of MLflow."""

    def __init__(self, queue_id: str) -> None:
        from mlflow.genai import review_queues

        self._id, self._queues = queue_id, review_queues

    def items(self) -> dict[str, str]:
        """Trace → its status: pending, complete or declined."""
        from mlflow.utils import get_results_from_paginated_fn

        entries = get_results_from_paginated_fn(
            lambda size, token: self._queues.list_review_queue_items(self._id, max_results=size, page_token=token), PAGE
        )
        return {item.item_id: str(item.status) for item in entries}

    def add(self, answers: Sequence[str]) -> None:
        for start in range(0, len(answers), PAGE):
            items = [TRACE + answer for answer in answers[start : start + PAGE]]
            self._queues.add_items_to_review_queue(self._id, item_ids=items)

    def complete(self, answer: str, judge: str) -> None:
        """Mark an answer as judged."""
        self._queues.set_review_queue_item_status(
            self._id, item_id=TRACE + answer, status="complete", completed_by=judge
        )


def forget_person(uri: str, user: str, pseudonym: str) -> int:
    """Delete a person's traces, and what they said of others', in every experiment; returns how many there were.

    Args:
        user: their name, as they signed assessments in MLflow.
    """
    from mlflow.tracing.client import TracingClient

    client, traces, num_traces = open_client(uri), TracingClient(uri), 0
    for experiment in client.search_experiments():
        theirs = _read(traces, experiment.experiment_id, f"metadata.`mlflow.trace.user` = '{pseudonym}'")
        _delete(traces, experiment.experiment_id, [TRACE + trace.answer for trace in theirs])
        num_traces += len(theirs)
        for trace in _read(traces, experiment.experiment_id, IS_OURS):
            for assessment in trace.assessments:
                if assessment.judge in (user, pseudonym):
                    traces.delete_assessment(TRACE + trace.answer, assessment.id)
                    num_traces += 1
    return num_traces


def _read(traces: TracingClient, experiment_id: str, query: str) -> list[ShownTrace]:
    from mlflow.utils import get_results_from_paginated_fn

    found = get_results_from_paginated_fn(
        lambda size, token: traces.search_traces(
            locations=[experiment_id], filter_string=query, max_results=size, page_token=token, include_spans=False
        ),
        PAGE,
    )
    return [_trace(trace.info) for trace in found]


def _trace(info: TraceInfo) -> ShownTrace:
    valid = (each for each in info.assessments if each.valid is not False and not each.issue)
    answer, model = info.trace_id.removeprefix(TRACE), info.tags.get(MODEL_TAG, "")
    return ShownTrace(answer, model, info.request_time or 0, tuple(map(_assessment, valid)))


def _assessment(assessment: MlflowAssessment) -> Assessment:
    content = assessment.feedback or assessment.expectation
    return Assessment(
        id=assessment.assessment_id or "",
        name=assessment.name,
        value=content.value if content is not None else None,
        comment=assessment.rationale or None,
        judge=assessment.source.source_id,
        is_person=assessment.source.source_type == "HUMAN",
        at_ms=assessment.last_update_time_ms or assessment.create_time_ms or 0,
        feedback=(assessment.metadata or {}).get(FEEDBACK_KEY),
    )


def _delete(traces: TracingClient, experiment_id: str, ids: Sequence[str]) -> None:
    for start in range(0, len(ids), 100):
        traces.delete_traces(experiment_id, trace_ids=list(ids[start : start + 100]))


def _span(answer: ShownAnswer) -> Any:
    from mlflow.entities import Span
    from mlflow.tracing.utils import build_otel_context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Status, StatusCode

    attributes = {
        "mlflow.traceRequestId": TRACE + answer.id,
        "mlflow.spanType": "CHAT_MODEL",
        "mlflow.spanInputs": dict(answer.request),
        "mlflow.spanOutputs": dict(answer.answer),
    }
    start = answer.at_ms * 1_000_000
    return Span(
        ReadableSpan(
            name="answer",
            context=build_otel_context(int(answer.id, 16), int(answer.id[:16], 16) or 1),
            start_time=start,
            end_time=start + round(1e9 * answer.latency_s),
            attributes={name: json.dumps(value, ensure_ascii=False) for name, value in attributes.items()},
            status=Status(StatusCode.OK),
        )
    )


def _questions() -> Iterator[dict[str, Any]]:
    """The questions for a reviewer: the signals of `live.feedback.answers`."""
    from mlflow.genai.label_schemas import InputCategorical, InputNumeric, InputText

    thumb, score = InputCategorical(options=["up", "down"]), InputNumeric(min_value=0.0, max_value=1.0)
    yield {"name": "thumb", "type": "feedback", "input": thumb, "instruction": "Is the answer good?"}
    yield {"name": "score", "type": "feedback", "input": score, "instruction": "0 is worst, 1 is best"}
    for name, text in (("correction", "The answer without its errors"), ("better", "Another answer, which is better")):
        yield {"name": name, "type": "expectation", "input": InputText(), "instruction": text}
    yield {"name": "text", "type": "feedback", "input": InputText(), "instruction": "Anything else"}
