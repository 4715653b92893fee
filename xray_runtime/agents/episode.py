"""One episode of an agent, as the gateway sees it: its calls, its limits, its result.

An agent that runs again after a kill is answered from the journal as long as it makes the same calls. A call that the
journal lacks is sampled; if the agent does not make all calls of the journal again, it is not the same episode
(`difference`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from xray_runtime.agents.pictures import RequestPictures
from xray_runtime.agents.posted import Posted
from xray_runtime.agents.request import OVER, AgentReply, RefusedError, Request, before_stop, read_calls
from xray_runtime.agents.segments import CallPosition, PolicyCall, Tree
from xray_runtime.agents.threads import in_thread
from xray_runtime.data.chat_format import ChatFormat
from xray_runtime.data.reasoning import split_reasoning
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.errors import shown
from xray_runtime.methods.common.sampling.reply_stream import ReplyStream
from xray_runtime.rewards.source import MAX_NAMES

COUNTS = ("calls", "retries", "refused", "cancelled", "left_out", "unanswered")


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode."""

    max_calls: int
    max_sampled_tokens: int
    """Tokens of all replies together."""
    context: int
    """Tokens of one prompt with its longest reply."""
    leave_out: bool
    """Answer calls that cannot be trained on and leave them out of the loss, instead of refusing them."""


class GeneratorFailedError(RuntimeError):
    """The generator raised an error; nothing is wrong with the call."""


@dataclass(frozen=True)
class Policy:
    """How the calls of a rollout are sampled."""

    chat_format: ChatFormat
    decode: Callable[[list[int]], str]
    sampler: ReplyStream
    sampling: Sampling
    version: int | None
    """None: the version that the generator holds when a call's turn comes."""
    seed_of: Callable[[str], int]
    """A call's key → its seed."""
    keep: Callable[[Iterable[PolicyCall]], None]
    """Journals calls before they are answered; called in a thread."""
    pictures: RequestPictures | None = None
    """Those that calls may have."""


class AgentEpisode:
    """An episode. All methods run on the gateway's event loop.

    Args:
        name: the same in a repeated run.
        known: calls of an earlier attempt by their key.
        ended: called once, when the agent has posted its final result or is broken off.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        limits: EpisodeLimits,
        known: Mapping[str, PolicyCall],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.secret = name, f"xray-{secrets.token_urlsafe(24)}"
        self._policy, self._limits, self._known, self._ended = policy, limits, dict(known), ended
        self._tree = Tree(policy.chat_format)
        self._placing = asyncio.Lock()
        self._num_sampled = 0
        self._begun: dict[str, int] = {}
        """Digest of place and options → number of calls there."""
        self._by_body: dict[str, asyncio.Future[list[AgentReply]]] = {}
        """Digest of a body → the answer of the last such request."""
        self._keys: dict[asyncio.Future[list[AgentReply]], list[str]] = {}
        self._cancelled = set[str]()
        self.counts = dict.fromkeys(COUNTS, 0)
        self.is_over = False
        self.reward: float | None = None
        self.info: dict[str, float] = {}
        self.unusable: str | None = None
        self.broken: str | None = None
        """Why the agent was broken off."""
        self.is_stale = False
        """Ended, because some of its calls are of too old a version."""

    @property
    def temperature(self) -> float:
        return self._policy.sampling.temperature

    @property
    def pictures(self) -> RequestPictures | None:
        return self._policy.pictures

    def count(self, name: str) -> None:
        self.counts[name] += 1

    def call(self, path: str, body: bytes, request: Request, repeats: bool) -> asyncio.Future[list[AgentReply]]:
        """Begin to answer a request; a repeated one gets the answer of the first.

        Args:
            repeats: the client says that it sent this body before.

        Raises:
            ValueError: the request is refused.
        """
        self._check_open()
        digest = hashlib.sha256(path.encode() + body).hexdigest()
        if repeats and digest in self._by_body:
            self.count("retries")
            pending = self._by_body[digest]
            self._cancelled -= set(self._keys[pending])
            return pending
        self._check_size(request)
        options, keys = self._options(request), list[str]()
        pending = asyncio.ensure_future(self._answer(request, options, keys))
        # Nothing awaits a call whose client disconnected; this marks its error as retrieved.
        pending.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._by_body[digest], self._keys[pending] = pending, keys
        return pending

    def leave(self, pending: asyncio.Future[list[AgentReply]]) -> None:
        """The client of a call went away before its answer; it is trained on only if another call continues it."""
        self.count("cancelled")
        self._cancelled |= set(self._keys[pending])
        if not self._keys[pending]:
            pending.cancel()  # it has no place yet

    def post(self, posted: Posted) -> None:
        """Take a result. Raises RefusedError if the episode is over."""
        self._check_open()
        if posted.unusable is not None:
            self.unusable = posted.unusable
        if posted.value is not None:
            self.reward = (self.reward or 0.0) + posted.value
        for name, value in posted.info.items():
            if name not in self.info and len(self.info) == MAX_NAMES:
                raise RefusedError(f"info[{name!r}] is one name too many: an episode may have {MAX_NAMES}")
            self.info[name] = self.info.get(name, 0.0) + value
        if posted.final:
            self.close()

    def break_off(self, why: str) -> None:
        """End an episode whose agent broke a rule; it has no reward."""
        if not self.is_over:
            self.broken = why
            self.close()

    def end_if_stale(self, oldest: int) -> None:
        """End an episode that has a call of a version before `oldest`."""
        if not self.is_over and any(call.version < oldest for call in self._tree.calls.values()):
            self.is_stale = True
            self.close()

    def close(self) -> None:
        """Accept nothing more. Calls that are not answered are not part of the episode."""
        if not self.is_over:
            self.is_over = True
            for pending in self._keys:
                if not pending.done():
                    self.counts["unanswered"] += bool(self._keys[pending])
                    pending.cancel()
            self._ended()

    def calls(self) -> list[PolicyCall]:
        return list(self._tree.calls.values())

    def trained(self) -> frozenset[str]:
        """Keys of the calls that are in the loss."""
        calls = self._tree.calls
        extended = {call.parent for call in calls.values()}
        return frozenset(
            key for key, call in calls.items() if call.is_trained and (key not in self._cancelled or key in extended)
        )

    def difference(self) -> str | None:
        """The first journaled call that this run did not make, beside one that it made in its place; None if there is
        none."""
        missing = [call for key, call in self._known.items() if key not in self._tree.calls]
        if not missing:
            return None
        old = next((call for call in missing if call.parent is None or call.parent in self._tree.calls), missing[0])
        new = [c for c in self._tree.calls.values() if c.parent == old.parent and c.key not in self._known]
        if not new:
            return f"a call of the journal was not made again: {json.dumps(old.messages[-1])[:200]}"
        pairs = zip(old.messages, new[0].messages, strict=False)
        last = (old.messages[-1], new[0].messages[-1])
        texts = [json.dumps(m, ensure_ascii=False) for m in next((p for p in pairs if p[0] != p[1]), last)]
        start = max(0, len(os.path.commonprefix(texts)) - 40)
        before, after = (text[start : start + 100] for text in texts)
        return f"a call differs from the journal's: {before} became {after}"

    def _check_open(self) -> None:
        if self.is_over:
            raise RefusedError("the episode is over", OVER)

    def _check_size(self, request: Request) -> None:
        """Refuse what cannot fit the context before it is brought into tokens, which may take long."""
        given, limit = request.prompt, self._limits.context
        if isinstance(given, list):
            unknown = next((id for id in given if not 0 <= id < self._policy.chat_format.num_tokens), None)
            if unknown is not None:
                raise RefusedError(f"prompt has the token {shown(unknown)}, which the policy does not know")
            size, what = len(given), "tokens"
        else:
            size, what = len(given or "") + sum(len(message["content"]) for message in request.messages), "characters"
            limit *= self._policy.chat_format.longest_token
        if size > limit:
            raise RefusedError(
                f"the prompt's {size:,} {what} are more than the context's {self._limits.context} tokens can hold",
                code="context_length_exceeded",
            )

    def _options(self, request: Request) -> dict[str, Any]:
        """How its sampling differs from the stage's."""
        if request.biases and not self._limits.leave_out:
            name, value = next(iter(request.biases.items()))
            raise RefusedError(
                f"{name} = {value} is not allowed: the reply would not be a sample of the policy that is trained; "
                "leave it out, or set environment.untrainable to leave_out"
            )
        options: dict[str, Any] = dict(request.biases)
        if request.max_tokens is not None and request.max_tokens < self._policy.sampling.max_new_tokens:
            options["max_new_tokens"] = request.max_tokens
        return options | ({"stop": request.stop} if request.stop else {})

    def _check_limits(self, request: Request, position: CallPosition, sampling: Sampling) -> None:
        limits = self._limits
        if len(position.prompt) + sampling.max_new_tokens > limits.context:
            raise RefusedError(
                f"the prompt's {len(position.prompt)} tokens and a reply of {sampling.max_new_tokens} are more than "
                f"the context's {limits.context}",
                code="context_length_exceeded",
            )
        if self.counts["calls"] + request.n > limits.max_calls:
            self.break_off(f"more than max_calls = {limits.max_calls} calls")
            self._check_open()
        # Replies under way count at their longest, so the order in which they end changes nothing.
        self._num_sampled += sampling.max_new_tokens * request.n
        if self._num_sampled > limits.max_sampled_tokens:
            self.break_off(f"replies of more than max_sampled_tokens = {limits.max_sampled_tokens} tokens")
            self._check_open()
        self.counts["calls"] += request.n

    def _take_keys(self, position: CallPosition, request: Request) -> list[str]:
        first = position.key(self.name, request, 0)
        begun = self._begun.get(first, 0)
        self._begun[first] = begun + request.n
        return [position.key(self.name, request, begun + choice) for choice in range(request.n)]

    async def _answer(self, request: Request, options: dict[str, Any], keys: list[str]) -> list[AgentReply]:
        sampling = replace(self._policy.sampling, **options)
        # One after another: calls have places in the order in which they arrived.
        async with self._placing:
            self._check_open()
            position = await in_thread(self._tree.place, request)
            self._check_limits(request, position, sampling)
            keys += self._take_keys(position, request)
        calls = await asyncio.gather(
            *(self._sampled(key, position, sampling, options, not request.biases) for key in keys)
        )
        fresh = [call for call in calls if call.key not in self._known]
        if fresh:
            # Written before the answer leaves: after a kill the agent must get the same one.
            await asyncio.to_thread(self._policy.keep, fresh)
        replies = []
        for call in calls:
            self._num_sampled -= sampling.max_new_tokens - len(call.ids)
            self.counts["left_out"] += not call.is_trained
            reply = self._reply(call, request)
            self._tree.add(call, request, reply.message() if request.prompt is None else reply.text)
            replies.append(reply)
        return replies

    async def _sampled(
        self, key: str, position: CallPosition, sampling: Sampling, options: dict[str, Any], is_trained: bool
    ) -> PolicyCall:
        if key in self._known:
            return self._known[key]
        seed = self._policy.seed_of(key)
        answer = self._policy.sampler.sample(position.prompt, seed, sampling, self._policy.version)
        try:
            sampled = await asyncio.wrap_future(answer)
        except Exception as error:
            raise GeneratorFailedError("the generator failed") from error
        parent = position.parent.key if position.parent else None
        return PolicyCall(key, parent, position.prompt, seed, *sampled, is_trained, options, position.messages)

    def _reply(self, call: PolicyCall, request: Request) -> AgentReply:
        is_chat = request.prompt is None
        text = self._policy.chat_format.texts([call.ids])[0] if is_chat else self._policy.decode(call.ids)
        text = before_stop(text, request.stop)
        reasoning, text = split_reasoning(text) if is_chat else (None, text)
        rest, calls = read_calls(text) if request.tools and request.calls_tools else (text, [])
        named = [{"id": f"call_{call.key[:16]}{n}", **each} for n, each in enumerate(calls)]
        finish = "tool_calls" if named else "stop" if call.ended else "length"
        return AgentReply(rest, named, finish, call.key[:24], len(call.prompt), len(call.ids), reasoning)


def call_from_json(given: Mapping[str, Any]) -> PolicyCall:
    """The call of a line of the journal, which has its fields."""
    # JSON has no tuples.
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in given["options"].items()}
    return PolicyCall(**{each.name: given[each.name] for each in fields(PolicyCall)} | {"options": options})
