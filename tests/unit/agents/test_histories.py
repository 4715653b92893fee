"""Generated histories: every sampled token is in the loss once, and none was encoded again."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.agents.parts import LIMITS, TOOL, FakeGenerator, logprob_of
from xray_runtime.agents.episode import AgentEpisode, Policy
from xray_runtime.agents.request import Request
from xray_runtime.agents.sampler import BatchSampler
from xray_runtime.agents.segments import Call, Row, Tree, rows
from xray_runtime.data.chat_format import chat_format
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.seeding import derive_seed

CALL = '<tool_call>\n{"name": "look", "arguments": {"b": 1, "a": [2]}}\n</tool_call>'


TEXTS = (None, None, CALL, f"{CALL}{CALL}", "<think>a</think> hi")


def policy_of(tokenizer: Any, text: Callable[[int], str | None]) -> Policy:
    sampling = Sampling(200, 1.0, (tokenizer.eos_token_id,), tokenizer.pad_token_id)
    return Policy(
        chat_format(tokenizer),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        BatchSampler(FakeGenerator(tokenizer, text)),
        sampling,
        0,
        lambda key: derive_seed(3, key),
        lambda calls: None,
    )


class Agent:
    """Does to its history all that agents do: reorders JSON, renames calls, edits, drops, summarizes, branches."""

    def __init__(self, draw: random.Random, episode: AgentEpisode) -> None:
        self.draw, self.episode, self.bodies = draw, episode, 0
        self.expected_parents: list[tuple[str, str]] = []
        """(key of a call, key of the call that it must continue)."""

    async def ask(self, messages: list[dict[str, Any]], after: str | None = None) -> tuple[dict[str, Any], str]:
        """(the answer's message, key of the call)."""
        self.bodies += 1
        body, request = str(self.bodies).encode(), Request(messages=messages, tools=[TOOL])
        before = set(self.episode._tree.calls)
        [reply] = await self.episode.call("/", body, request, False)
        if self.draw.random() < 0.1:  # the same body again: no new call
            assert await self.episode.call("/", body, request, True) == [reply]
        [key] = [key for key in self.episode._tree.calls if key.startswith(reply.id)]
        assert key not in before
        if after is not None:
            self.expected_parents.append((key, after))
        return reply.message(), key

    async def run(self) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {self.draw.randrange(3)}"}]
        after: str | None = None
        for turn in range(self.draw.randint(1, 5)):
            answer, key = await self.ask(messages, after)
            messages, after = [*messages, self._as_sent(answer)], key
            messages += self._observed(answer, turn)
            change = self.draw.random()
            if change < 0.12 and len(messages) > 3:  # an edited turn
                place = self.draw.randrange(len(messages) - 1)
                messages[place] = messages[place] | {"content": "changed"}
                after = None
            elif change < 0.2:  # a summary
                messages, after = [{"role": "user", "content": f"summary {turn}"}], None
            elif change < 0.3:  # a sub-agent beside it
                await asyncio.gather(self._sub(f"sub {turn}"), self._sub(f"sub {turn}"))
            elif change < 0.4:  # another answer to the same history
                await self.ask(messages, after)

    async def _sub(self, text: str) -> None:
        messages = [{"role": "system", "content": "help"}, {"role": "user", "content": text}]
        answer, key = await self.ask(messages)
        await self.ask([*messages, self._as_sent(answer), {"role": "user", "content": f"more {key}"}])

    def _as_sent(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer as a client sends it back."""
        sent = json.loads(json.dumps(answer, sort_keys=True))
        sent["content"] = sent["content"] + self.draw.choice(["", "\n"])
        for call in sent.get("tool_calls", ()):
            call["id"] = f"renamed-{call['id']}"
            call["function"]["arguments"] = dict(reversed(call["function"]["arguments"].items()))
        return sent

    def _observed(self, answer: dict[str, Any], turn: int) -> list[dict[str, Any]]:
        calls = answer.get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": f"renamed-{c['id']}", "content": f"no {turn}"} for c in calls]
        return results or [{"role": "user", "content": f"go on {turn}"}]


def played(tokenizer: Any, numbers: range) -> list[tuple[AgentEpisode, Agent]]:
    """The episodes with these numbers, at the same time."""

    async def play() -> list[tuple[AgentEpisode, Agent]]:
        policy = policy_of(tokenizer, lambda seed: TEXTS[seed % len(TEXTS)])
        episodes = [AgentEpisode(f"episode-{number}", policy, LIMITS, {}) for number in numbers]
        agents = [Agent(random.Random(n), episode) for n, episode in zip(numbers, episodes, strict=True)]
        await asyncio.gather(*(agent.run() for agent in agents))
        return list(zip(episodes, agents, strict=True))

    return asyncio.run(play())


def problems(calls: list[Call], found: list[Row], expected: list[tuple[str, str]]) -> list[str]:
    """Violations of the contract."""
    wrong = []
    in_loss = [token for row in found for token, own in zip(row.ids, row.sampled, strict=True) if own]
    if sorted(in_loss) != sorted(token for call in calls for token in call.ids):
        wrong.append("the loss does not have each sampled token once")
    by_key = {call.key: call for call in calls}
    for key, parent in expected:
        before = by_key[parent].tokens
        if by_key[key].prompt[: len(before)] != before:
            wrong.append("a continued history was encoded again")
    for row in found:
        before = list(row.prompt)
        for token, logprob, own in zip(row.ids, row.logprobs, row.sampled, strict=True):
            # One forward over the row gives each token the log-probability that it was sampled at.
            if own and logprob != logprob_of(before, token):
                wrong.append("a log-probability is not that of its row")
            before.append(token)
    return wrong


@pytest.mark.parametrize("histories", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_every_sampled_token_is_in_the_loss_once_and_none_is_encoded_again(tokenizer: Any, histories: int) -> None:
    num_rows, num_calls = 0, 0
    for number, (episode, agent) in enumerate(played(tokenizer, range(histories))):
        found = rows(episode.calls(), episode.trained())
        assert problems(episode.calls(), found, agent.expected_parents) == [], number
        shuffled = random.Random(number).sample(episode.calls(), len(episode.calls()))
        assert rows(shuffled, episode.trained()) == found
        num_rows, num_calls = num_rows + len(found), num_calls + len(episode.calls())
    assert histories < num_rows < num_calls


def test_a_gateway_that_encodes_again_fails_that_test(tokenizer: Any, monkeypatch: Any) -> None:
    """The check is not empty: with histories written anew for each call it finds problems."""
    own = Tree.place

    def encoded_again(self: Tree, request: Request) -> Any:
        self._by_history.clear()
        return own(self, request)

    monkeypatch.setattr(Tree, "place", encoded_again)
    wrong = 0
    for episode, agent in played(tokenizer, range(20)):
        found = rows(episode.calls(), episode.trained())
        wrong += bool(problems(episode.calls(), found, agent.expected_parents))
    assert wrong > 5


def test_a_template_that_rewrites_turns_is_rendered_whole_for_each_call(tokenizer: Any) -> None:
    """As templates do that drop the thinking of earlier turns."""
    import copy

    other = copy.deepcopy(tokenizer)
    last_only = "{{ '<|' + message['role'] + '|>' + ('' if loop.last else '~') + message['content'] }}"
    other.chat_template = tokenizer.chat_template.replace(
        "{{ '<|' + message['role'] + '|>' + message['content'] }}", last_only
    )
    assert other.chat_template != tokenizer.chat_template

    async def talk() -> AgentEpisode:
        episode = AgentEpisode("e", policy_of(other, lambda seed: "aha"), LIMITS, {})
        messages = [{"role": "user", "content": "hi"}]
        for turn in range(3):
            [reply] = await episode.call("/", str(turn).encode(), Request(messages=messages), False)
            messages = [*messages, reply.message(), {"role": "user", "content": "go on"}]
        return episode

    episode = asyncio.run(talk())
    assert [call.parent for call in episode.calls()] == [None] * 3
    found = rows(episode.calls(), episode.trained())
    assert [row.ids for row in found] == [episode.calls()[0].ids] * 3
    assert problems(episode.calls(), found, []) == []
