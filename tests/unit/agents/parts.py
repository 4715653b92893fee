"""A gateway over a generator that is a function of seed and prompt, and what it needs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from xray_runtime.agents.episode import AgentEpisode, EpisodeLimits, Policy
from xray_runtime.agents.gateway import Gateway
from xray_runtime.agents.segments import PolicyCall
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.chat_format import ChatFormat, chat_format
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.seeding import derive_seed

TEXTS = ["question number one", "an answer to it", "go on then", "the tool says no", "think about it"] * 5
LIMITS = EpisodeLimits(max_calls=1000, max_sampled_tokens=100_000, context=20_000, leave_out=False)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def make_tokenizer() -> Any:
    return train_tokenizer(TEXTS, 300)


def logprob_of(prompt: list[int], token: int) -> float:
    """Any function of everything before the token."""
    return -float(np.float32((sum(prompt) * 31 + len(prompt) * 7 + token) % 97) / 16)


@dataclass
class FakeGenerator:
    """Samples bytes in place of merged tokens, which the tokenizer would write as others."""

    tokenizer: Any
    text: str | Callable[[int], str | None] | None = None
    """Every reply, or a function of its seed; None: a few letters, which the seed decides."""
    pause: threading.Event | None = None
    error: Exception | None = None
    batches: list[int] = field(default_factory=list)

    def __call__(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        if self.pause is not None:
            assert self.pause.wait(20)
        if self.error is not None:
            raise self.error
        self.batches.append(len(rows.seed))
        replies, logprobs, ended = [], [], []
        for prompt, seed in zip(rows.input_ids, rows.seed.tolist(), strict=True):
            draw = random.Random(seed)
            text = self.text(seed) if callable(self.text) else self.text
            text = "".join(draw.choices("anthoi", k=draw.randint(1, 6))) if text is None else text
            ids = [self._bytes[b] for b in text.encode()]
            ids = [*ids, self.tokenizer.eos_token_id][: sampling.max_new_tokens]
            before, found = prompt.tolist(), []
            for token in ids:
                found.append(logprob_of(before, token))
                before.append(token)
            replies.append(ids)
            logprobs.append(found)
            ended.append(ids[-1] == self.tokenizer.eos_token_id)
        return ReplyBatch(
            response_ids=Ragged.of(replies), rollout_logprobs=Ragged.of(logprobs, np.float32), ended=np.array(ended)
        )

    @cached_property
    def _bytes(self) -> list[int]:
        """Token of each byte."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        letters = bytes_to_unicode()
        return [self.tokenizer.convert_tokens_to_ids(letters[value]) for value in range(256)]


@dataclass
class World:
    """A gateway with what was journaled through it."""

    tokenizer: Any
    generator: FakeGenerator
    gateway: Gateway
    journal: dict[str, PolicyCall] = field(default_factory=dict)

    @property
    def format(self) -> ChatFormat:
        return chat_format(self.tokenizer)

    def policy(self, **fields: Any) -> Policy:
        def keep(calls: Iterable[PolicyCall]) -> None:
            self.journal.update({call.key: call for call in calls})

        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        found = Policy(
            self.format,
            lambda ids: str(self.tokenizer.decode(ids, skip_special_tokens=True)),
            self.gateway.sampler,
            Sampling(2000, 1.0, (eos,), pad),
            0,
            lambda key: derive_seed(3, key),
            keep,
        )
        return replace(found, **fields)

    def open(
        self,
        name: str = "a",
        limits: EpisodeLimits = LIMITS,
        known: Mapping[str, PolicyCall] | None = None,
        **fields: Any,
    ) -> AgentEpisode:
        episode = AgentEpisode(name, self.policy(**fields), limits, known or {})
        self.gateway.open(episode)
        return episode

    def openai(self, episode: AgentEpisode, **fields: Any) -> Any:
        import openai

        options = {"base_url": f"{self.gateway.url(episode)}/v1", "api_key": episode.secret, "max_retries": 0} | fields
        return openai.OpenAI(**options)

    def anthropic(self, episode: AgentEpisode) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.gateway.url(episode), api_key=episode.secret, max_retries=0)


@contextmanager
def opened(tokenizer: Any, **fields: Any) -> Iterator[World]:
    generator = FakeGenerator(tokenizer, **fields)
    with closing(Gateway(generator)) as gateway:
        yield World(tokenizer, generator, gateway)
