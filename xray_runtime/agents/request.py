"""A call of an agent, whichever API it speaks, and its answer.

Fields of an API fall into three sorts: those that are read; those that change nothing here and are ignored; those that
would change the distribution of the reply, which the policy cannot be trained on. The last are refused in one line or,
with `untrainable: leave_out`, sampled as requested and left out of the loss.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xray_runtime.agents.pictures import RequestPictures
from xray_runtime.data.chat_format import HERMES
from xray_runtime.data.messages import read_messages, read_tools
from xray_runtime.data.pairs import Messages
from xray_runtime.data.reading.pictures import PICTURE_PARTS
from xray_runtime.kernel.errors import shown

IGNORED = frozenset(
    (
        *("model", "seed", "user", "metadata", "store", "service_tier", "safety_identifier", "stream"),
        *("prompt_cache_key", "prompt_cache_retention", "stream_options", "parallel_tool_calls", "reasoning"),
        *("reasoning_effort", "verbosity", "modalities", "include", "truncation", "text", "response_format"),
        *("suffix", "thinking", "cache_control", "max_tool_calls", "background", "output_config"),
        *("context_management", "inference_geo", "speed", "container"),
    )
)
"""The seed is derived from the call's place, the model is the policy. JSON schemas are not enforced, because a policy
that is forced to write JSON does not learn to."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "functions": (),
    "function_call": (),
    "logprobs": (False,),
}
"""Fields that are refused unless they are missing, null, or one of these values."""
BIASING: dict[str, float | int | None] = {"top_p": 1.0, "top_k": None, "min_p": 0.0, "repetition_penalty": 1.0}
"""Fields that change the distribution, and the value that does not."""
MAX_CHOICES, MAX_STOPS = 64, 16
LARGEST_BIAS = 1e6
OVER = 403
"""Status of calls after the end of their episode."""


class RefusedError(ValueError):
    """A call that is not answered; one line.

    Args:
        status: HTTP status. Clients repeat 408, 409, 429 and those above 499.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Request:
    """A call in the form that all APIs share."""

    messages: Messages = field(default_factory=list)
    """Without tools; empty for a completion."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | list[int] | None = None
    """Text or tokens of a completion."""
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls_tools: bool = True
    """False: calls in the reply are left as text."""
    biases: dict[str, float | int] = field(default_factory=dict)
    """Sampling parameters that differ from the stage's, which leave the reply out of the loss."""


@dataclass(frozen=True)
class AgentReply:
    """A sampled reply as an agent sees it."""

    text: str
    """Without reasoning and tool calls, and without the stop text."""
    calls: list[dict[str, Any]]
    """[{"id", "name", "arguments"}], arguments as an object."""
    finish: str
    """`stop`, `length` or `tool_calls`."""
    id: str
    num_prompt: int
    """Tokens of the prompt, and of the reply."""
    num_tokens: int
    reasoning: str | None = None

    def message(self) -> dict[str, Any]:
        """The assistant's message in X-ray's form."""
        calls: list[dict[str, Any]] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in self.calls
        ]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})


class RequestReader:
    """Reads the fields of a request's body.

    Args:
        temperature: the stage's.
        pictures: those that messages may have; None: the stage's rows have none.
    """

    def __init__(self, body: Any, temperature: float, pictures: RequestPictures | None = None) -> None:
        if not isinstance(body, dict):
            raise RefusedError(f"the body is a {type(body).__name__}: must be a JSON object")
        self._body = {name: value for name, value in body.items() if value is not None}
        self._temperature, self._pictures, self._read = temperature, pictures, set[str]()

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a field. Raises RefusedError if it is of another type."""
        self._read.add(name)
        value = self._body.get(name, default)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        is_bool = isinstance(value, bool) and bool not in kinds
        if name in self._body and (is_bool or not isinstance(value, kinds)):
            names = " or ".join(k.__name__ for k in kinds)
            raise RefusedError(f"{name} = {shown(value)} is not allowed: must be {names}")
        return value

    def count(self, name: str, highest: int | None = None, default: int | None = None) -> int | None:
        """A whole number from 1."""
        value: int | None = self.get(name, int, default)
        if value is not None and not 1 <= value <= (highest or value):
            limit = f"from 1 to {highest}" if highest else "at least 1"
            raise RefusedError(f"{name} = {value} is not allowed: must be {limit}")
        return value

    def messages(self, value: Any, name: str = "messages") -> Messages:
        """Messages in OpenAI's form. Raises ValueError; also if the last is the assistant's."""
        given = value if isinstance(value, list) else []
        for number, message in enumerate(given, start=1):
            if isinstance(message, dict) and has_pictures(message.get("content")):
                where = f"the request: message {number} of {name}"
                message["content"] = [self._picture(where, part) for part in message["content"]]
        messages = read_messages("the request", name, value)
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            if not isinstance(call.get("id"), str | None):
                raise RefusedError(f"{name} has a call with the id {shown(call['id'])}: must be a text")
        if messages[-1]["role"] == "assistant":
            raise RefusedError(f"{name}: the last message must not be the assistant's: nothing is left to answer")
        return messages

    def _picture(self, where: str, part: Any) -> Any:
        """A content part, or the picture that it is."""
        if not is_picture(part):
            return part
        if self._pictures is None:
            raise RefusedError(f"{where} has a picture, and the stage's rows have none")
        return self._pictures.read(where, part)

    def stop(self, name: str = "stop") -> tuple[str, ...]:
        """Texts that end the reply."""
        value = self.get(name, (str, list), [])
        texts = [value] if isinstance(value, str) else value
        if len(texts) > MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
            raise RefusedError(f"{name} = {shown(value)} is not allowed: must be up to {MAX_STOPS} texts")
        return tuple(texts)

    def tools(self, tools: list[Any]) -> list[dict[str, Any]]:
        """Schemas of functions, in the form of Chat Completions. Raises ValueError."""
        checked = read_tools("the request", {"tools": tools})
        for tool in checked:
            function = tool.get("function")
            if (
                tool.get("type") != "function"
                or not isinstance(function, dict)
                or not isinstance(function.get("name"), str)
            ):
                raise RefusedError(f"tools has {shown(tool)}, which is not supported; allowed: functions with a name")
        return checked

    def calls_tools(self, choice: Any) -> bool:
        """Whether calls in the reply are read. Raises RefusedError if one is demanded."""
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if kind not in (None, "auto", "none"):
            raise RefusedError(
                f"tool_choice = {shown(choice)} is not allowed: must be auto or none; a forced call is not the policy's"
            )
        return kind != "none"

    def checked(self, request: Request) -> Request:
        """The request, with its biases. Raises RefusedError if a field that was not read is not supported."""
        biases = self._biases()
        for name in sorted(self._body.keys() - self._read - IGNORED):
            if name not in NEUTRAL:
                raise RefusedError(f"{name} is not supported")
            if self._body[name] not in NEUTRAL[name]:
                allowed = " or ".join(["left out", *map(repr, NEUTRAL[name])])
                raise RefusedError(f"{name} = {shown(self._body[name])} is not allowed: must be {allowed}")
        return replace(request, biases=biases)

    def _biases(self) -> dict[str, float | int]:
        biases: dict[str, float | int] = {}
        for name, neutral in {"temperature": self._temperature, **BIASING}.items():
            value = self.get(name, (int, float), neutral)
            off = name == "top_k" and value in (-1, 0)
            if value != neutral and not off:
                if not 0 < value <= LARGEST_BIAS:
                    limits = f"above 0, and at most {LARGEST_BIAS:g}"
                    raise RefusedError(f"{name} = {shown(value)} is not allowed: must be {limits}")
                if name == "top_k" and value != int(value):
                    raise RefusedError(f"{name} = {value} is not allowed: must be a whole number")
                biases[name] = value
        return biases


def has_pictures(content: Any) -> bool:
    """Whether a message's content has parts that are pictures."""
    return isinstance(content, list) and any(map(is_picture, content))


def is_picture(part: Any) -> bool:
    """Whether a content part is a picture."""
    return isinstance(part, dict) and part.get("type") in PICTURE_PARTS


def read_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(text without calls, calls) of a reply in the form of Hermes; a call that is not valid stays text."""
    calls = []

    def take(part: Any) -> str:
        try:
            call = json.loads(part[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return str(part[0])
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return str(part[0])
        calls.append({"name": name, "arguments": arguments})
        return ""

    rest = HERMES.sub(take, text)
    return (rest.strip() if calls else text), calls


def before_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first of the texts `stop`."""
    places = [index for index in map(text.find, stop) if index >= 0]
    return text[: min(places)] if places else text


def text_of(name: str, content: Any, kinds: Collection[str]) -> str:
    """Text, or the joined texts of content parts of these kinds."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RefusedError(
                f"{name} has a part of type {kind!r}, which is not supported; allowed: {', '.join(kinds)}"
            )
        texts.append(part["text"])
    return "\n".join(texts)
