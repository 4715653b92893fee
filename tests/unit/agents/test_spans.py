"""Spans of agents' calls, read from OpenTelemetry's own exporters."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.unit.agents.parts import FakeGenerator, World
from xray_runtime.agents.gateway import Gateway
from xray_runtime.agents.spans import VARIABLE, Spans

ASK = [{"role": "user", "content": "question"}]


def test_each_call_is_a_span_with_what_was_asked_for_and_answered(tokenizer: Any) -> None:
    exporter, generator = InMemorySpanExporter(), FakeGenerator(tokenizer)
    with closing(Gateway(generator, spans=Spans(SimpleSpanProcessor(exporter)))) as gateway:
        world = World(tokenizer, generator, gateway)
        episode = world.open("row-3")
        client = world.openai(episode)
        answer = client.chat.completions.create(model="any", messages=ASK, max_tokens=50, n=2)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="any", messages=ASK, temperature=0.3)
        world.anthropic(episode).messages.create(model="any", messages=ASK, max_tokens=50)
        httpx.post(f"{gateway.url(episode)}/v1/chat/completions", headers={"x-api-key": "another"})
    whole, refused, message = exporter.get_finished_spans()
    assert dict(whole.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "xray",
        "gen_ai.conversation.id": "row-3",
        "gen_ai.request.model": "any",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.model": "policy",
        "gen_ai.response.id": whole.attributes["gen_ai.response.id"],
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(call.ids) for call in list(world.journal.values())[:2]),
    }
    assert (whole.name, whole.status.is_ok, whole.end_time > whole.start_time) == ("chat policy", True, True)
    assert refused.attributes["error.type"] == "RefusedError"
    assert "temperature" in refused.status.description
    assert message.attributes["gen_ai.usage.output_tokens"] > 0
    assert "question" not in whole.to_json()


def test_a_named_exporter_writes_spans_and_another_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = FakeGenerator(tokenizer)
    monkeypatch.setenv(VARIABLE, "console")
    with closing(Gateway(generator)) as gateway:
        world = World(tokenizer, generator, gateway)
        world.openai(world.open("row-4")).chat.completions.create(model="any", messages=ASK)
    written = capsys.readouterr()
    assert json.loads(written.err)["attributes"]["gen_ai.conversation.id"] == "row-4"
    assert written.out == ""
    monkeypatch.setenv(VARIABLE, "pigeon")
    with pytest.raises(ValueError, match=f"{VARIABLE} is 'pigeon': must be none, console or otlp"):
        Gateway(generator)
