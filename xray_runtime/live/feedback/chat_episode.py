"""A checkpoint's answer to one message of a person: a reply, or an episode of an environment.

As in training, earlier turns of an episode are not encoded again. An environment has one task, so the person's next
message begins another episode, whose prompt holds the last reply of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import Messages, prompt_text
from xray_runtime.data.reasoning import split_reasoning
from xray_runtime.data.tokenizing import decode_replies
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.live.feedback.chat_model import ChatModel, PromptLimits
from xray_runtime.methods.common.environment_protocol import Start, Step


class Environments(Protocol):
    """Episodes of an environment by number, such as an `EnvironmentPool`."""

    def reset(self, episode: int, task: Mapping[str, Any], seed: int) -> Future[Start]:
        """Begin an episode."""

    def step(self, episode: int, reply: str) -> Future[Step]:
        """Answer a reply in it."""


def play(
    model: ChatModel,
    limits: PromptLimits,
    messages: Messages,
    seed: int,
    pool: Environments | None = None,
    max_turns: int = 1,
) -> Iterator[str | Step]:
    """Replies in pieces as they come, and after each the answer of the environment in `pool`.

    The episode ends when the environment ends it or gives no message, at a reply that was cut off, after `max_turns`,
    or when another reply would not fit.

    Raises:
        EnvironmentFailure: the environment failed.
        ValueError: the chat template refuses the messages, or the prompt is too long for the model.
    """
    form, number = chat_format(limits.tokenizer), 0
    if pool is not None:
        task = {"prompt": prompt_text(messages), "messages": messages}
        messages = pool.reset(number, task, derive_seed(seed, "environment")).result().prompt(messages)
    [ids] = form.prompts([messages])
    for turn in range(max_turns):
        excess = limits.excess_of(len(ids))
        if excess > 0 and turn:
            return
        if excess > 0:
            raise ValueError(f"too long for the model by {excess} tokens: shorten it")
        reply: list[int] = []
        yield from model.reply(ids, derive_seed(seed, turn), reply)
        if pool is None or reply[-1] not in limits.sampling.stop_token_ids:
            return
        [text] = decode_replies(limits.tokenizer, [reply])
        step = pool.step(number, split_reasoning(text)[1]).result()
        yield step
        if step.terminated or step.truncated or not step.messages:
            return
        ids = [*ids, *reply, *form.observations(step.messages, reply[-1])]
