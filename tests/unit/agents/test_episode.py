"""Limits, repeats, the journal, and the ways in which calls can go wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.unit.agents.parts import LIMITS, World, opened
from xray_runtime.agents.segments import rows

ASK = [{"role": "user", "content": "question"}]


def ask(client: Any, text: str = "question", **fields: Any) -> str:
    messages = [{"role": "user", "content": text}]
    found: str = client.chat.completions.create(model="x", messages=messages, **fields).choices[0].message.content
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_64_episodes_call_at_once_and_get_what_they_get_alone(world: World, tokenizer: Any) -> None:
    episodes = [world.open(f"e{number}") for number in range(64)]
    with ThreadPoolExecutor(64) as threads:
        together = list(threads.map(lambda episode: ask(world.openai(episode, timeout=100)), episodes))
    assert max(world.generator.batches) > 1
    assert len(set(together)) > 8
    with opened(tokenizer) as other:
        for number in (0, 17, 63):
            assert ask(other.openai(other.open(f"e{number}"))) == together[number]


def test_a_seed_depends_on_the_place_alone(world: World, tokenizer: Any) -> None:
    """Two runs of one episode: its sub-agents race in another order, with other dates and random ids in their texts."""
    texts = [f"sub-agent {number} at 2026-01-0{number + 1}T10:00:00Z 0123456789abcdef{number}" for number in range(4)]
    client = world.openai(world.open())
    first = {text[:12]: ask(client, text) for text in texts}
    with opened(tokenizer) as other:
        client = other.openai(other.open())
        again = {text[:12]: ask(client, text.replace("2026", "2027")) for text in reversed(texts)}
        assert ask(client, texts[0]) != first[texts[0][:12]]  # the second of equals
    assert again == first
    assert len(set(first.values())) == 4


def test_a_repeated_request_gets_the_stored_answer_and_counts_once(world: World) -> None:
    episode = world.open()
    repeated = {"extra_headers": {"x-stainless-retry-count": "1"}}
    client = world.openai(episode)
    assert ask(client) == ask(client, **repeated)
    assert len(episode.calls()) == 1
    assert episode.counts["retries"] == 1
    ask(client)  # without the header it is another sample
    assert len(episode.calls()) == 2


def test_an_abandoned_call_is_in_the_loss_only_if_continued(tokenizer: Any) -> None:
    gate = threading.Event()
    with opened(tokenizer, pause=gate) as world:
        episode = world.open()
        with pytest.raises(openai.APITimeoutError):
            ask(world.openai(episode, timeout=0.3))
        wait_for(lambda: episode.counts["cancelled"] == 1)
        gate.set()
        wait_for(lambda: len(episode.calls()) == 1)
        assert episode.trained() == frozenset()
        text = tokenizer.decode(episode.calls()[0].ids, skip_special_tokens=True)
        more = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        world.openai(episode).chat.completions.create(model="x", messages=more)
        assert len(episode.trained()) == 2


def test_limits_of_calls_and_tokens_end_the_episode(world: World) -> None:
    few = world.open("few", replace(LIMITS, max_calls=2))
    client = world.openai(few)
    ask(client), ask(client)
    with pytest.raises(openai.PermissionDeniedError, match="the episode is over"):
        ask(client)
    assert few.broken == "more than max_calls = 2 calls"
    short = world.open("short", replace(LIMITS, max_sampled_tokens=20))
    for _ in range(2):
        ask(world.openai(short), max_tokens=10)
    with pytest.raises(openai.PermissionDeniedError):
        [ask(world.openai(short), max_tokens=10) for _ in range(20)]
    assert short.broken == "replies of more than max_sampled_tokens = 20 tokens"
    narrow = world.open("narrow", replace(LIMITS, context=30))
    with pytest.raises(openai.BadRequestError, match="more than the context's 30") as error:
        ask(world.openai(narrow), "a long question " * 10, max_tokens=5)
    assert error.value.code == "context_length_exceeded"
    assert not narrow.is_over


def test_an_episode_knows_no_other_secret_and_nothing_after_its_end(world: World) -> None:
    one, two = world.open("one"), world.open("two")
    with pytest.raises(
        openai.AuthenticationError, match="there is no such episode, or the API key belongs to another one"
    ):
        ask(world.openai(one, api_key=two.secret))
    post = httpx.post(f"{world.gateway.url(one)}/reward", json={"value": 1}, headers={"x-api-key": two.secret})
    assert post.status_code == 401
    assert one.reward is None
    headers = {"authorization": f"Bearer {one.secret}"}
    first = httpx.post(f"{world.gateway.url(one)}/reward", json={"value": 0.5, "final": False}, headers=headers)
    assert first.json() == {"ended": False}
    ask(world.openai(one))
    httpx.post(f"{world.gateway.url(one)}/reward", json={"value": 0.25, "info": {"steps": 3}}, headers=headers)
    assert (one.reward, one.info, one.is_over) == (0.75, {"steps": 3.0}, True)
    with pytest.raises(openai.PermissionDeniedError):
        ask(world.openai(one))
    late = httpx.post(f"{world.gateway.url(one)}/reward", json={"value": 9}, headers=headers)
    assert late.status_code == 403
    assert one.reward == 0.75


def test_a_posted_lie_breaks_the_episode_off(world: World) -> None:
    episode = world.open()
    url, headers = f"{world.gateway.url(episode)}/reward", {"x-api-key": episode.secret}
    answer = httpx.post(url, content=b'{"value": NaN}', headers=headers)
    assert answer.status_code == 400
    assert episode.broken == "the agent posted no valid result: value is nan: must be a finite number"


def test_an_agent_that_runs_again_is_answered_from_the_journal(world: World, tokenizer: Any) -> None:
    episode = world.open()
    first = [ask(world.openai(episode), f"question {number}") for number in range(3)]
    with opened(tokenizer) as other:
        again = other.open(known=world.journal)
        client = other.openai(again)
        assert [ask(client, f"question {number}") for number in (2, 0)] == [first[2], first[0]]
        assert other.generator.batches == []
        assert again.difference() == (
            'a call of the journal was not made again: {"role": "user", "content": "question 1"}'
        )
        ask(client, "question 1 changed")
        assert again.difference() == (
            'a call differs from the journal\'s: {"role": "user", "content": "question 1"} became '
            '{"role": "user", "content": "question 1 changed"}'
        )
        ask(client, "question 1")
        assert again.difference() is None
        ask(client, "question 3")  # new ones are sampled
        assert other.generator.batches == [1, 1]


def test_a_broken_generator_is_no_fault_of_the_agent(tokenizer: Any) -> None:
    with opened(tokenizer, error=OSError("gone")) as world:
        episode = world.open()
        with pytest.raises(openai.InternalServerError, match="the generator failed") as error:
            ask(world.openai(episode))
        assert error.value.status_code == 503
        assert error.value.response.headers["retry-after"] == "1"
        assert str(world.gateway.sampler.failure) == "gone"
        assert episode.broken is None


def test_calls_unanswered_at_the_end_are_not_in_the_episode(tokenizer: Any) -> None:
    gate = threading.Event()
    with opened(tokenizer, pause=gate) as world, ThreadPoolExecutor(1) as thread:
        episode = world.open()
        pending = thread.submit(ask, world.openai(episode))
        wait_for(lambda: episode.counts["calls"] == 1)
        world.gateway.call(episode.close)
        with pytest.raises(openai.PermissionDeniedError, match="the episode is over"):
            pending.result(20)
        gate.set()
        assert episode.counts["unanswered"] == 1
        assert rows(episode.calls(), episode.trained()) == []
