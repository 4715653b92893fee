"""OpenTelemetry spans of agents' calls, by the conventions for generative AI, where `OTEL_TRACES_EXPORTER` names an
exporter.

OpenTelemetry's own variables say where it sends them. Spans have no content: what was said is in the ledger.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xray_runtime.agents.request import AgentReply

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

VARIABLE = "OTEL_TRACES_EXPORTER"
EXPORTERS = ("none", "console", "otlp")
REQUESTED: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "gen_ai.request.model": ("model", str),
    "gen_ai.request.max_tokens": ("max_tokens", int),
    "gen_ai.request.temperature": ("temperature", (int, float)),
    "gen_ai.request.choice.count": ("n", int),
}
"""Attribute → (field of a request, its type)."""


class Spans:
    """One span per call.

    Args:
        processor: takes the spans that end.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        # Not the process's own provider: MLflow and Ray have theirs.
        self._provider = TracerProvider(resource=Resource.create({"service.name": "xray"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("xray.agents")

    @contextmanager
    def call(self, episode: str, path: str) -> Iterator[Span]:
        """The span of a call that arrived, until it is answered or fails."""
        from opentelemetry.trace import SpanKind, StatusCode

        operation = "text_completion" if path == "v1/completions" else "chat"
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "xray",
            "gen_ai.conversation.id": episode,
        }
        span = self._tracer.start_span(f"{operation} policy", kind=SpanKind.SERVER, attributes=attributes)
        try:
            yield span
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR, " ".join(str(error).split()))
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


def note_request(span: Span, given: Any) -> None:
    """Add what a request asked for."""
    for attribute, (name, kind) in REQUESTED.items():
        if isinstance(given, dict) and isinstance(given.get(name), kind):
            span.set_attribute(attribute, given[name])


def note_replies(span: Span, replies: Sequence[AgentReply]) -> None:
    """Add the answer."""
    span.set_attribute("gen_ai.response.model", "policy")
    span.set_attribute("gen_ai.response.id", replies[0].id)
    span.set_attribute("gen_ai.response.finish_reasons", [reply.finish for reply in replies])
    span.set_attribute("gen_ai.usage.input_tokens", replies[0].num_prompt)
    span.set_attribute("gen_ai.usage.output_tokens", sum(reply.num_tokens for reply in replies))


def named_spans() -> Spans | None:
    """The spans for the exporters that the environment names; None: it names none.

    Raises:
        ValueError: it names one that is not known.
    """
    name = os.environ.get(VARIABLE, "").strip() or "none"
    if name not in EXPORTERS:
        raise ValueError(f"{VARIABLE} is {name!r}: must be {', '.join(EXPORTERS[:-1])} or {EXPORTERS[-1]}")
    if name == "none":
        return None
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor

    if name == "console":
        # Standard output may be a result that another program reads.
        return Spans(SimpleSpanProcessor(ConsoleSpanExporter(out=sys.stderr)))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Spans(BatchSpanProcessor(OTLPSpanExporter()))
