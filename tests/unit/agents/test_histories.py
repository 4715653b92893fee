"""Generated histories: every sampled token is in the loss once, and none was encoded again."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.agents.parts import LIMITS, TOOL, FakeGenerator
from xray_runtime.agents import chat
from xray_runtime.agents.episode import AgentEpisode, Policy
from xray_runtime.agents.request import Request
from xray_runtime.agents.segments import CallPosition, PolicyCall, Tree, rows
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.sampling.agent_rows import BranchRow
from xray_runtime.methods.common.sampling.reply_stream import ReplyStream
from xray_runtime.models.causal_lm import fresh_llama
from xray_runtime.models.config import FreshBase

CALL = '<tool_call>\n{"name": "look", "arguments": {"b": 1, "a": [2]}}\n</tool_call>'
THOUGHT = "<think>a</think>"
AT_ONCE = 50
TEXTS = (None, None, CALL, f"{CALL}{CALL}", f"{THOUGHT} hi")


class TinyGenerator(FakeGenerator):
    """Log-probabilities are those of a real model."""

    def __init__(self, tokenizer: Any, text: Callable[[int], str | None]) -> None:
        super().__init__(tokenizer, text)
        sizes = FreshBase(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, max_positions=8192)
        self.model = fresh_llama(sizes, tokenizer, seed=1).eval()

    def __call__(self, rows: TextBatch, sampling: Sampling, version: int) -> TextBatch:
        found = super().__call__(rows, sampling, version)
        pairs = zip(rows.input_ids, found.response_ids, strict=True)
        logprobs = [self.logprobs([*prompt, *reply])[len(prompt) - 1 :] for prompt, reply in pairs]
        return found.with_columns(rollout_logprobs=Ragged.of(logprobs, np.float32))

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> list[float]:
        """The log-probability of each token after the first, by one forward."""
        logits = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found: list[float] = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return found


def policy_of(tokenizer: Any, generator: FakeGenerator) -> Policy:
    sampling = Sampling(200, 1.0, (tokenizer.eos_token_id,), tokenizer.pad_token_id)
    return Policy(
        chat_format(tokenizer),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        ReplyStream(generator),
        sampling,
        0,
        lambda key: derive_seed(3, key),
        lambda calls: None,
    )


class Agent:
    """Does to its history all that agents do: reorders JSON, renames calls, edits, drops, summarizes, branches."""

    def __init__(self, draw: random.Random, episode: AgentEpisode) -> None:
        self.draw, self.episode = draw, episode
        self.expected_parents: list[tuple[str, str]] = []
        """(key of a call, key of the call that it must continue)."""

    async def ask(self, messages: list[dict[str, Any]], after: str | None = None) -> tuple[dict[str, Any], str]:
        """(the answer's message, key of the call), over the text of a request and of its answer."""
        fields = {"model": "x", "messages": messages, "tools": [TOOL], "n": self.draw.choice([1, 1, 1, 2])}
        text = json.dumps(fields, indent=self.draw.choice([None, 1]), sort_keys=self.draw.random() < 0.5)
        body, request = text.encode(), chat.read(json.loads(text), 1.0)
        before = set(self.episode._tree.calls)
        replies = await self.episode.call("/", body, request, False)
        if self.draw.random() < 0.1:  # the same body again: an answer that was given
            given = self.episode.counts["calls"]
            again = self.episode.call("/", body, request, True)
            assert self.episode.counts["calls"] == given
            await again  # the answer of a sub-agent alike, which may still be sampled
        keys = [key for reply in replies for key in self.episode._tree.calls if key.startswith(reply.id)]
        assert len(keys) == len(replies)
        assert not before & {*keys}
        if after is not None:
            self.expected_parents += [(key, after) for key in keys]
        place = self.draw.randrange(len(replies))
        return json.loads(json.dumps(chat.answer(replies)))["choices"][place]["message"], keys[place]

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
            elif change < 0.24:  # dropped thinking
                dropped = [m | {"content": (m["content"] or "").replace(THOUGHT, "")} for m in messages]
                messages, after = dropped, None
            elif change < 0.32:  # a summary
                messages, after = [{"role": "user", "content": f"summary {turn}"}], None
            elif change < 0.42:  # sub-agents beside it, alike and different
                await asyncio.gather(*(self._sub(f"sub {turn}{name}") for name in ("", "", " other")))
            elif change < 0.52:  # another answer to the same history
                await self.ask(messages, after)

    async def _sub(self, text: str) -> None:
        messages = [{"role": "system", "content": "help"}, {"role": "user", "content": text}]
        answer, key = await self.ask(messages)
        await self.ask([*messages, self._as_sent(answer), {"role": "user", "content": f"more {key}"}])

    def _as_sent(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer as a client sends it back."""
        sent = dict(sorted(answer.items()))
        if sent["content"] is not None:
            sent["content"] += self.draw.choice(["", "\n"])
        for call in sent.get("tool_calls", ()):
            arguments = dict(reversed(json.loads(call["function"]["arguments"]).items()))
            call["id"] = f"renamed-{call['id']}"
            call["function"]["arguments"] = json.dumps(arguments, indent=self.draw.choice([None, 2]))
        return sent

    def _observed(self, answer: dict[str, Any], turn: int) -> list[dict[str, Any]]:
        # `_as_sent` has renamed them.
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"no {turn}"}
            for call in answer.get("tool_calls", ())
        ]
        return results or [{"role": "user", "content": f"go on {turn}"}]


def played(tokenizer: Any, numbers: range) -> tuple[TinyGenerator, list[tuple[AgentEpisode, Agent]]]:
    """The episodes with these numbers, at the same time."""
    generator = TinyGenerator(tokenizer, lambda seed: TEXTS[seed % len(TEXTS)])

    async def play() -> list[tuple[AgentEpisode, Agent]]:
        policy = policy_of(tokenizer, generator)
        episodes = [AgentEpisode(f"episode-{number}", policy, LIMITS, {}) for number in numbers]
        agents = [Agent(random.Random(n), episode) for n, episode in zip(numbers, episodes, strict=True)]
        await asyncio.gather(*(agent.run() for agent in agents))
        return list(zip(episodes, agents, strict=True))

    return generator, asyncio.run(play())


def problems(
    generator: TinyGenerator, calls: list[PolicyCall], found: list[BranchRow], expected: list[tuple[str, str]]
) -> list[str]:
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
        scored = generator.logprobs([*row.prompt, *row.ids])[len(row.prompt) - 1 :]
        apart = [abs(a - b) for a, b, own in zip(scored, row.logprobs, row.sampled, strict=True) if own]
        if max(apart) > 1e-5:
            wrong.append("a log-probability is not that of one forward over its row")
    return wrong


@pytest.mark.parametrize("histories", [10, pytest.param(1000, marks=pytest.mark.long)])
def test_every_sampled_token_is_in_the_loss_once_and_none_is_encoded_again(tokenizer: Any, histories: int) -> None:
    num_rows, num_calls = 0, 0
    for first in range(0, histories, AT_ONCE):
        generator, episodes = played(tokenizer, range(first, min(first + AT_ONCE, histories)))
        for number, (episode, agent) in enumerate(episodes, first):
            found = rows(episode.calls(), episode.trained())
            assert problems(generator, episode.calls(), found, agent.expected_parents) == [], number
            shuffled = random.Random(number).sample(episode.calls(), len(episode.calls()))
            assert rows(shuffled, episode.trained()) == found
            num_rows, num_calls = num_rows + len(found), num_calls + len(episode.calls())
        print(f"{first + len(episodes)} histories, {num_calls} calls, {num_rows} rows")
    assert histories < num_rows < num_calls


def forgets(self: Tree, request: Request) -> CallPosition:
    """Every call begins with its whole history in tokens."""
    self._by_history.clear()
    return OWN(self, request)


def encodes_again(self: Tree, request: Request) -> CallPosition:
    """Calls continue others, but with their whole history in tokens again."""
    first, *others = request.messages
    [prompt] = self._format.prompts([[first | {"tools": request.tools}, *others]])
    return replace(OWN(self, request), prompt=prompt)


OWN = Tree.place


@pytest.mark.parametrize("place", [forgets, encodes_again])
def test_a_gateway_that_encodes_again_fails_that_test(tokenizer: Any, monkeypatch: Any, place: Any) -> None:
    monkeypatch.setattr(Tree, "place", place)
    generator, episodes = played(tokenizer, range(10))
    wrong = 0
    for episode, agent in episodes:
        found = rows(episode.calls(), episode.trained())
        wrong += bool(problems(generator, episode.calls(), found, agent.expected_parents))
    assert wrong > 2


def test_a_template_that_rewrites_turns_is_rendered_whole_for_each_call(tokenizer: Any) -> None:
    """As templates do that drop the thinking of earlier turns."""
    import copy

    other = copy.deepcopy(tokenizer)
    last_only = "{{ ('' if loop.last else '~') + message['content'] }}"
    other.chat_template = tokenizer.chat_template.replace("{{ message['content'] }}", last_only)
    assert other.chat_template != tokenizer.chat_template

    generator = TinyGenerator(other, lambda seed: "aha")

    async def talk() -> AgentEpisode:
        episode = AgentEpisode("e", policy_of(other, generator), LIMITS, {})
        messages = [{"role": "user", "content": "hi"}]
        for turn in range(3):
            [reply] = await episode.call("/", str(turn).encode(), Request(messages=messages), False)
            messages = [*messages, reply.message(), {"role": "user", "content": "go on"}]
        return episode

    episode = asyncio.run(talk())
    assert [call.parent for call in episode.calls()] == [None] * 3
    found = rows(episode.calls(), episode.trained())
    assert [row.ids for row in found] == [episode.calls()[0].ids] * 3
    assert problems(generator, episode.calls(), found, []) == []
