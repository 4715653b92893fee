"""The clients that people use, unchanged, against the gateway."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.unit.agents.parts import LIMITS, TOOL, World
from xray_runtime.agents.segments import rows

CALL = '<tool_call>\n{"name": "look", "arguments": {"b": 1, "a": [2]}}\n</tool_call>'
ASK = [{"role": "user", "content": "question"}]


def test_chat_is_answered_whole_and_streamed_with_the_same_text(world: World) -> None:
    whole = world.openai(world.open()).chat.completions.create(model="any", messages=ASK, seed=5)
    [call] = world.journal.values()
    assert whole.choices[0].message.content == world.tokenizer.decode(call.ids, skip_special_tokens=True)
    assert whole.choices[0].finish_reason == "stop"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(call.prompt), len(call.ids))
    # The same episode from its start: the same seed, so the same reply.
    with world.openai(world.open()).chat.completions.create(model="x", messages=ASK, stream=True) as stream:
        parts = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert len(world.journal) == 1


def test_a_loop_of_tool_calls_stays_one_row(world: World) -> None:
    world.generator.text = f"well {CALL}"
    episode = world.open()
    client, messages = world.openai(episode), list[Any](ASK)
    for _ in range(3):
        message = client.chat.completions.create(model="x", messages=messages, tools=[TOOL]).choices[0].message
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"a": [2], "b": 1})
        # Other white space, other order of keys, another id.
        changed = {"id": "other", "type": "function", "function": {"name": "look", "arguments": '{"a":[2],"b" :1}'}}
        messages += [
            {"role": "assistant", "content": message.content, "tool_calls": [changed]},
            {"role": "tool", "tool_call_id": "other", "content": "nothing"},
        ]
    [row] = rows(episode.calls(), episode.trained())
    assert sum(row.sampled) == sum(len(call.ids) for call in episode.calls()) == 3 * len(episode.calls()[0].ids)


def test_responses_keep_text_and_calls_of_a_reply_together(world: World) -> None:
    world.generator.text = f"well {CALL}"
    episode = world.open()
    client = world.openai(episode)
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
    first = client.responses.create(model="x", instructions="be good", input="question", tools=[tool])
    assert [item.type for item in first.output] == ["message", "function_call"]
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "no"}
    given = [*ASK, *(item.model_dump() for item in first.output), output]
    with client.responses.stream(model="x", instructions="be good", input=given, tools=[tool]) as stream:
        second = stream.get_final_response()
    assert second.output_text == "well"
    assert second.status == "completed"
    assert len(rows(episode.calls(), episode.trained())) == 1


def test_messages_of_anthropic(world: World) -> None:
    world.generator.text = f"well {CALL}"
    episode = world.open()
    client = world.anthropic(episode)
    tools: Any = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
    options: Any = {"model": "x", "max_tokens": 500, "system": "be good", "tools": tools}
    first = client.messages.create(messages=ASK, **options)
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert first.content[1].input == {"a": [2], "b": 1}
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "no"}]}
    more = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=more, **options) as stream:
        second = stream.get_final_message()
    assert second.content[1].input == {"a": [2], "b": 1}
    assert len(rows(episode.calls(), episode.trained())) == 1


def test_completions_continue_their_text_and_stop(world: World) -> None:
    world.generator.text = "one. two. three"
    episode = world.open()
    client = world.openai(episode)
    first = client.completions.create(model="x", prompt="count: ", stop=["two"])
    assert first.choices[0].text == "one. "
    assert first.choices[0].finish_reason == "stop"
    client.completions.create(model="x", prompt="count: one. and")
    one, two = episode.calls()
    assert two.prompt[: len(one.tokens)] == one.tokens
    by_ids = client.completions.create(model="x", prompt=two.tokens, max_tokens=3)
    assert by_ids.choices[0].finish_reason == "length"
    [row] = rows(episode.calls(), episode.trained())
    assert sum(row.sampled) == sum(len(call.ids) for call in episode.calls())


def test_several_choices_are_siblings_and_the_first_is_the_only_one_of_one(world: World) -> None:
    episode = world.open()
    choices = world.openai(episode).chat.completions.create(model="x", messages=ASK, n=3).choices
    assert len({call.seed for call in episode.calls()}) == len(choices) == 3
    assert len(rows(episode.calls(), episode.trained())) == 3
    alone = world.openai(world.open()).chat.completions.create(model="x", messages=ASK).choices[0]
    assert alone.message.content == choices[0].message.content


REFUSED = [
    ({"temperature": 0.3}, "temperature = 0.3 is not allowed"),
    ({"top_p": 0.5}, "top_p = 0.5 is not allowed"),
    ({"logit_bias": {"5": 1}}, "logit_bias = {'5': 1} is not allowed: must be left out or {}"),
    ({"presence_penalty": 1}, "presence_penalty = 1 is not allowed"),
    ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice = 'required' is not allowed"),
    ({"n": 0}, "n = 0 is not allowed: must be from 1 to 64"),
    ({"max_tokens": True}, "max_tokens = True is not allowed: must be int"),
    ({"extra_body": {"guided_regex": "a"}}, "guided_regex is not supported"),
    ({"messages": [*ASK, {"role": "assistant", "content": "I"}]}, "the last message must not be the assistant's"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "message 1 of messages has a picture"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_a_call_that_cannot_be_trained_on_is_refused_in_one_line(
    world: World, fields: dict[str, Any], reason: str
) -> None:
    episode = world.open()
    with pytest.raises(openai.BadRequestError) as error:
        world.openai(episode).chat.completions.create(**{"model": "x", "messages": ASK} | fields)
    assert isinstance(error.value.body, dict)
    assert reason in error.value.body["message"]
    assert "\n" not in error.value.body["message"]
    assert episode.counts["refused"] == 1
    assert not episode.calls()


def test_a_biased_call_can_be_answered_and_left_out_of_the_loss(world: World) -> None:
    from dataclasses import replace

    episode = world.open(limits=replace(LIMITS, leave_out=True))
    client = world.openai(episode)
    biased = client.chat.completions.create(model="x", messages=ASK, temperature=0.5).choices[0].message
    assert rows(episode.calls(), episode.trained()) == []
    more = [*ASK, {"role": "assistant", "content": biased.content}, {"role": "user", "content": "go on"}]
    client.chat.completions.create(model="x", messages=more)
    [row] = rows(episode.calls(), episode.trained())
    left_out, counted = episode.calls()
    assert [i for i, own in zip(row.ids, row.sampled, strict=True) if own] == counted.ids
    assert row.ids[: len(left_out.ids)] == left_out.ids
    assert episode.counts["left_out"] == 1


def test_errors_have_the_form_that_each_client_reads(world: World) -> None:
    import anthropic

    episode = world.open()
    with pytest.raises(anthropic.BadRequestError, match="top_k = 5 is not allowed"):
        world.anthropic(episode).messages.create(model="x", max_tokens=5, messages=ASK, extra_body={"top_k": 5})
    with pytest.raises(openai.NotFoundError):
        world.openai(episode).embeddings.create(model="x", input="a")
    assert [model.id for model in world.openai(episode).models.list()] == ["policy"]
