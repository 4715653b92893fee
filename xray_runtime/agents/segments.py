"""The calls of one episode as a tree of sampled tokens.

A call whose history continues what an earlier call was answered is a child of that call: its prompt is the recorded
tokens of the parent, then the new messages in tokens. Sampled tokens are never encoded again:

    call 1    prompt  reply                                 parent: none
    call 2    prompt  reply  observation  reply             parent: call 1
    call 3    prompt  reply  another observation  reply     parent: call 1, a branch

Histories are compared as messages, whatever the client did to their JSON: key order, white space in arguments, ids of
calls and outer white space of texts do not count. A message that was changed ends the match: the tokens up to there are
kept, and the rest follows as the client wrote it. A template that writes earlier turns differently once others follow
cannot be continued, so each of its calls begins with the whole history in tokens; so does a call with a picture behind
a reply, since rows have pictures in prompts alone.

Each call is in the loss once. A row is a call and the first child of each call in it; every other child begins a row
whose prompt is all the tokens before its reply (`rows`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from xray_runtime.agents.request import Request
from xray_runtime.data.chat_format import ChatFormat
from xray_runtime.data.pairs import Messages
from xray_runtime.data.pictures import PARTS, picture_ids, pictures_of
from xray_runtime.methods.common.sampling.agent_rows import BranchRow
from xray_runtime.methods.common.sampling.reply_stream import Runs, by_token, oldest

VOLATILE = re.compile(
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?\b|\b\d\d:\d\d:\d\d(?:\.\d+)?\b"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{16,}\b"
)
"""Dates, times and random ids, which would give a repeated run other seeds."""


@dataclass(frozen=True)
class PolicyCall:
    """One sampled reply."""

    key: str
    parent: str | None
    """Key of the call that it continues."""
    prompt: list[int]
    seed: int
    ids: list[int]
    logprobs: list[float]
    ended: bool
    versions: Runs
    """Which versions of the policy sampled it."""
    is_trained: bool
    """False: it was sampled from another distribution than the policy's."""
    options: dict[str, Any]
    """How it was sampled, where that differs from the stage's sampling."""
    messages: Messages = field(default_factory=list)
    """Additions of its history to the parent's (`numbered`), the first of a history with `tools`; of a completion
    [{"prompt": text or tokens}]."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.ids

    @property
    def version(self) -> int:
        """The oldest version."""
        return oldest(self.versions, 0)


@dataclass(frozen=True)
class CallPosition:
    """Where a call belongs in the tree."""

    parent: PolicyCall | None
    prompt: list[int]
    new: list[str]
    """Canonical messages after the parent's history."""
    messages: Messages
    """The same as `PolicyCall.messages`."""

    def key(self, episode: str, request: Request, occurrence: int) -> str:
        """A digest of the place: the same for the same call in a repeated run, whatever runs beside it."""
        parent = self.parent.key if self.parent else None
        stable = [VOLATILE.sub("", message) for message in self.new]
        options = [request.max_tokens, request.stop, request.calls_tools, sorted(request.biases.items())]
        return _digest([episode, parent, stable, _tools(request), options, occurrence])[:32]


class Tree:
    """The answered calls of one episode."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format
        self.calls: dict[str, PolicyCall] = {}
        """Key → call."""
        self._by_history: dict[str, list[PolicyCall]] = {}
        """Digest of a history with its answer → calls with equal ones."""
        self._completions: list[tuple[str, PolicyCall]] = []
        """(prompt and reply as text, call) of completions."""

    def add(self, call: PolicyCall, request: Request, answer: dict[str, Any] | str) -> None:
        """Add a call with what its agent receives: a message, or the text of a completion."""
        self.calls[call.key] = call
        if request.prompt is None:
            assert isinstance(answer, dict)
            digest = _history(request, [*request.messages, answer])[-1]
            self._by_history.setdefault(digest, []).append(call)
        elif isinstance(request.prompt, str):
            self._completions.append((f"{request.prompt}{answer}", call))

    def place(self, request: Request) -> CallPosition:
        """The place of a request, with its prompt in tokens. A thread may call it while calls are added.

        Raises:
            ValueError: the chat template refuses the messages.
        """
        if request.prompt is not None:
            return self._place_completion(request.prompt)
        messages, digests = canonical(request.messages), _history(request, request.messages)
        # The last message is not the policy's, so a match always leaves one.
        for length in range(len(messages) - 1, 0, -1):
            known = self._by_history.get(digests[length - 1])
            if known:
                parent, rest = known[0], request.messages[length:]
                if pictures_of(rest):
                    break
                try:
                    observed = self._format.observations(rest, parent.ids[-1])
                except ValueError:
                    break
                return CallPosition(
                    parent, parent.tokens + observed, messages[length:], numbered(request.messages)[length:]
                )
        first, *others = request.messages
        history = [first | ({"tools": request.tools} if request.tools else {}), *others]
        [prompt] = self._format.prompts([history])
        return CallPosition(None, prompt, messages, numbered(history))

    def _place_completion(self, prompt: str | list[int]) -> CallPosition:
        if isinstance(prompt, list):
            found = [c for c in list(self.calls.values()) if prompt[: len(c.tokens)] == c.tokens]
            parent = max(found, key=lambda call: len(call.tokens), default=None)
            known = len(parent.tokens) if parent is not None else 0
            return CallPosition(parent, list(prompt), [json.dumps(prompt)], [{"prompt": prompt[known:]}])
        texts = [(text, call) for text, call in list(self._completions) if prompt.startswith(text)]
        text, parent = max(texts, key=lambda found: len(found[0]), default=("", None))
        rest = prompt[len(text) :]
        [encoded] = self._format.control.encode([rest])
        ids = encoded.ids if parent is None else parent.tokens + encoded.ids
        return CallPosition(parent, ids, [rest], [{"prompt": rest}])


def canonical(messages: Messages) -> list[str]:
    """Each message as a text that is equal for messages that mean the same."""
    numbers: dict[Any, int] = {}
    names: dict[Any, Any] = {}
    sorted_calls = []
    for message in messages:
        role, content = message["role"], message["content"]
        parts: list[Any] = [role, content.strip() if role == "assistant" else content]
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            # Clients rename calls; results refer to them.
            numbers[call.get("id")] = len(numbers)
            names[call.get("id")] = function["name"]
            parts.append([function["name"], function.get("arguments", {})])
        if role == "tool":
            id = message.get("tool_call_id")
            parts += [numbers.get(id, id), names.get(id, message.get("name"))]
        # As numbers, which `VOLATILE` leaves.
        parts += [picture_ids(picture["sha256"], PARTS) for picture in message.get("pictures", ())]
        sorted_calls.append(json.dumps(parts, sort_keys=True, ensure_ascii=False))
    return sorted_calls


def numbered(messages: Messages) -> Messages:
    """The messages with ids of calls that derive from their order: clients draw them at random."""
    ids: dict[Any, str] = {}
    found = []
    for message in messages:
        copied = dict(message)
        if "tool_calls" in copied:
            for call in copied["tool_calls"]:
                ids[call.get("id")] = call_id(len(ids))
            copied["tool_calls"] = [call | {"id": ids[call.get("id")]} for call in copied["tool_calls"]]
        if "tool_call_id" in copied:
            copied["tool_call_id"] = ids.get(copied["tool_call_id"], call_id(0))
        found.append(copied)
    return found


def call_id(number: int) -> str:
    """Id of the call with this number in its history; nine letters and digits, as Mistral's template wants."""
    return f"call{number:05}"


def _history(request: Request, messages: Messages) -> list[str]:
    """For each message, a digest of the tools and of all messages up to it."""
    digests, last = [], _tools(request)
    for message in canonical(messages):
        last = _digest([last, message])
        digests.append(last)
    return digests


def _tools(request: Request) -> str:
    return _digest(request.tools)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def rows(calls: Sequence[PolicyCall], trained: frozenset[str]) -> list[BranchRow]:
    """The calls as rows in which each call of `trained` is in the loss once.

    The result does not depend on the order of `calls`.
    """
    by_key = {call.key: call for call in calls}
    children: dict[str | None, list[PolicyCall]] = {}
    # A call that leads to no trained call is in no row.
    wanted = {ancestor.key for key in trained for ancestor in _ancestors(by_key, key)}
    for call in sorted(calls, key=lambda call: call.key):
        if call.key in wanted:
            children.setdefault(call.parent, []).append(call)
    found: list[BranchRow] = []
    beginnings = [(call, call.prompt) for call in reversed(children.get(None, []))]
    while beginnings:
        call, prompt = beginnings.pop()
        row, branches = BranchRow(prompt, [], [], [], []), []
        while True:
            _append(row, call.prompt[len(row.prompt) + len(row.ids) :])
            _append(row, call.ids, call if call.key in trained else None)
            first, *others = children.get(call.key, [None])
            branches += [(other, other.prompt) for other in others if other is not None]
            if first is None:
                break
            call = first
        found.append(row)
        beginnings += reversed(branches)
    return found


def _ancestors(by_key: dict[str, PolicyCall], key: str | None) -> Iterator[PolicyCall]:
    while key is not None:
        yield by_key[key]
        key = by_key[key].parent


def _append(row: BranchRow, ids: list[int], trained: PolicyCall | None = None) -> None:
    row.ids.extend(ids)
    row.logprobs.extend([0.0] * len(ids) if trained is None else trained.logprobs)
    row.sampled.extend([trained is not None] * len(ids))
    row.versions.extend([None] * len(ids) if trained is None else by_token(trained.versions))
