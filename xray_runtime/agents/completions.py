"""OpenAI's Completions: `POST /v1/completions`, of a text or of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from xray_runtime.agents.chat import Event, usage
from xray_runtime.agents.pictures import RequestPictures
from xray_runtime.agents.request import MAX_CHOICES, AgentReply, RefusedError, Request, RequestReader
from xray_runtime.kernel.errors import shown


def read(body: Any, temperature: float, pictures: RequestPictures | None = None) -> Request:
    """The request in a body. Raises ValueError if it is refused."""
    reader = RequestReader(body, temperature, pictures)
    prompt = reader.get("prompt", (str, list), "")
    is_ids = isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise RefusedError(f"prompt = {shown(prompt)} is not allowed: must be one text, or a list of token ids")
    return reader.checked(
        Request(
            prompt=prompt,
            n=reader.count("n", MAX_CHOICES, 1) or 1,
            max_tokens=reader.count("max_tokens"),
            stop=reader.stop(),
            calls_tools=False,
        )
    )


def answer(replies: Sequence[AgentReply]) -> dict[str, Any]:
    """The body of an answer."""
    choices = [
        {"index": number, "text": reply.text, "finish_reason": reply.finish, "logprobs": None}
        for number, reply in enumerate(replies)
    ]
    head = {"id": f"cmpl-{replies[0].id}", "object": "text_completion", "created": 0, "model": "policy"}
    return head | {"choices": choices, "usage": usage(replies)}


def events(whole: dict[str, Any]) -> Iterator[Event]:
    """An answer as a stream."""
    for choice in whole["choices"]:
        yield None, whole | {"choices": [choice], "usage": None}
    yield None, whole | {"choices": []}
    yield None, "[DONE]"
