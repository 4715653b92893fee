"""Conversations in tokens under a tokenizer's chat template, where a message cannot forge control tokens.

A template is rendered twice: with the messages, and with an unguessable word in place of each message. The second
rendering shows the template's own output: the control tokens, and the position of each message. With the messages
inserted it must equal the first rendering, apart from outer whitespace (Llama 3 and Gemma trim), or the template is
refused. So ids are those of transformers' `apply_chat_template`, except that a message that spells a control token
stays text.

An assistant's reply is located by the template's `{% generation %}` blocks if it has them, else by the position of its
text, else (tool calls) by rendering the conversation before it. The reply includes the end of its turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from xray_runtime.data.control_tokens import ControlTokens, Encoded, unguessable
from xray_runtime.data.pairs import Messages
from xray_runtime.data.rendering_limit import check_size, limited_rendering

TODAY = datetime(2024, 7, 26, tzinfo=UTC)
"""A fixed date for templates that write one; otherwise the same data would have other tokens the next day."""
USER_TURN, ASSISTANT_TURN = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
PARAMETERS = {"type": "object", "properties": {"c": {"type": "string", "description": "d"}}, "required": ["c"]}
TOOL = {"type": "function", "function": {"name": "call", "description": "e", "parameters": PARAMETERS}}
CALL = {"type": "function", "function": {"name": "call", "arguments": {"c": "f"}}}
HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
"""The form of tool calls of Hermes and Qwen: a JSON object with name and arguments."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Turns(NamedTuple):
    """A conversation in tokens."""

    ids: list[int]
    spans: list[tuple[int, int]]
    """For each requested reply: its first token, and one past the end of its turn."""


class Rendered(NamedTuple):
    """A conversation as text, and spans in it, in characters."""

    text: str
    spans: list[tuple[int, int]]

    def named(self, control: ControlTokens) -> Rendered:
        """Text in which control tokens have their names."""
        spans = [(len(control.named(self.text[:a])), len(control.named(self.text[:b]))) for a, b in self.spans]
        return Rendered(control.named(self.text), spans)


def chat_format(tokenizer: Any) -> ChatFormat:
    """The format of a tokenizer's current template. Raises ValueError as `ControlTokens`."""
    template = tokenizer.chat_template
    return _chat_format(tokenizer, template if isinstance(template, str) else json.dumps(template))


@lru_cache(maxsize=8)
def _chat_format(tokenizer: Any, template: str) -> ChatFormat:
    return ChatFormat(tokenizer)


class ChatFormat:
    """The chat template and the tokens of `tokenizer`. Every method raises a one-line ValueError if the template
    refuses a conversation, changes a message's text, or omits a message, a tool or a call."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.control = tokenizer, ControlTokens(tokenizer)
        secret = unguessable()
        self._slot_prefix, self._spare_prefix = f"{secret}a", f"{secret}b"
        self._slots = re.compile(f"{self._slot_prefix}([0-9]{{6}})")
        self._spares = {
            token: f"{self._spare_prefix}{number:06}" for number, token in enumerate(sorted(self.control.ids))
        }
        self._spelled = {spare: token for token, spare in self._spares.items()}
        self._spare = re.compile(f"{self._spare_prefix}[0-9]{{6}}")

    @cached_property
    def num_tokens(self) -> int:
        """Size of the vocabulary."""
        return len(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Largest number of characters of a token; a byte counts as one."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def end_of_turn(self) -> int:
        """The token with which the template ends an assistant's turn. Raises ValueError if there is none, so that
        nothing would stop a reply."""
        return self.control.find(self._one_turn.text[slice(*self._one_turn.spans[0])])[-1][2]

    @cached_property
    def _lead(self) -> tuple[str, int]:
        """(text before a reply, from the last control token on; the number of its characters in the prompt)."""
        prompt, rendering = self._render([USER_TURN], True).text, self._one_turn
        begin = max((start for start, _, _ in self.control.find(prompt)), default=0)
        between = rendering.text[len(prompt) : rendering.spans[0][0]] if rendering.text.startswith(prompt) else ""
        return prompt[begin:] + between, len(prompt) - begin

    @cached_property
    def _one_turn(self) -> Rendered:
        """A conversation of one turn, and the span of its reply."""
        return self._render([USER_TURN, ASSISTANT_TURN], False, (1,))

    @cached_property
    def writes_hermes_calls(self) -> bool:
        """Whether the template shows tools, and writes calls as `HERMES`."""
        reply = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
        try:
            text = self._tokenizer.decode(self.calling_reply([USER_TURN | {"tools": [TOOL]}], reply))
            return [json.loads(call) for call in HERMES.findall(text)] == [CALL["function"]] * 2
        except ValueError:
            return False

    def prompts(self, prompts: Sequence[Messages], **variables: Any) -> list[list[int]]:
        """Ids up to the start of the assistant's reply; `variables` are the template's."""
        texts = [self._render(messages, True, (), variables).text for messages in prompts]
        return [encoded.ids for encoded in self.control.encode(texts)]

    def replies(self, replies: Sequence[str]) -> list[list[int]]:
        """Ids of replies after a prompt, each with the end of its turn."""
        lead, own = self._lead
        [of_prompt] = self.control.encode([lead[:own]])
        found = []
        for reply, encoded in zip(replies, self.control.encode([lead + reply for reply in replies]), strict=True):
            ids, known = encoded.ids, len(of_prompt.ids)
            if ids[:known] != of_prompt.ids:
                # A token would span prompt and reply, but the prompt's tokens are fixed: encode the reply alone.
                [encoded] = self.control.encode([self.control.name_of(self.end_of_turn) + lead[own:] + reply])
                ids, known = encoded.ids, 1
            found.append([*ids[known:], self.end_of_turn])
        return found

    def calling_reply(self, prompt: Messages, reply: dict[str, Any]) -> list[int]:
        """Ids of a reply with tool calls, after its prompt, with the end of its turn."""
        before = self._render(prompt, True).text
        rendering = self._render([*prompt, reply], False, (len(prompt),))
        start, end = rendering.spans[0]
        text = rendering.text[:end]
        start = len(before) if text.startswith(before) else start
        of_prompt, encoded = self.control.encode([text[:start], text])
        known = len(of_prompt.ids)
        if encoded.ids[:known] != of_prompt.ids:
            # As in `replies`: encode the reply alone.
            [encoded] = self.control.encode([self.control.name_of(self.end_of_turn) + text[start:]])
            known = 1
        return encoded.ids[known:]

    def observations(self, messages: Messages, last: int) -> list[int]:
        """Ids of the messages between two replies, up to the start of the next reply.

        Args:
            last: last token of the previous reply; if it does not end the turn, the ids begin with the end of turn.

        Raises:
            ValueError: see the class; also if the template changes earlier turns, so that sampled tokens would differ
            when they are encoded again.
        """
        rendering = self._render([USER_TURN, ASSISTANT_TURN, *messages], True, (1,))
        _, end = rendering.spans[0]
        if self._one_turn.text[: self._one_turn.spans[0][1]] != rendering.text[:end]:
            raise ValueError("the chat template writes a turn differently once another follows it")
        [encoded] = self.control.encode([self.control.name_of(self.end_of_turn) + rendering.text[end:]])
        return encoded.ids[1:] if last == self.end_of_turn else encoded.ids

    def turns(self, conversations: Sequence[tuple[Messages, Collection[int]]]) -> list[Turns]:
        """Ids of whole conversations, and the positions of the replies with the given indices."""
        rendered = [self._render(messages, False, replies) for messages, replies in conversations]
        encoded = self.control.encode([r.text for r in rendered])
        return [Turns(e.ids, [_tokens_of(e, span) for span in r.spans]) for e, r in zip(encoded, rendered, strict=True)]

    def _render(
        self,
        messages: Messages,
        prompt: bool,
        replies: Collection[int] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendered:
        tools = messages[0].get("tools")
        texts = [{k: v for k, v in message.items() if k != "tools"} for message in messages]
        plain = self._apply(texts, tools, prompt, variables).text
        tools = self._guard(tools)
        marked = [self._guard(m) | ({"content": self._slot(n)} if m["content"] else {}) for n, m in enumerate(texts)]
        skeleton = self._apply(marked, tools, prompt, variables, marks=bool(replies))
        self._check_nothing_is_left_out(messages, skeleton.text)
        forms = self._forms(messages, plain, skeleton.text)
        named = skeleton.named(self.control)
        spans = [self._span(marked, tools, named, number) for number in sorted(replies)]
        at = [(len(self._filled(named.text[:start], forms)), end) for start, end in spans]
        return Rendered(
            self._filled(named.text, forms), [(start, len(self._filled(named.text[:end], forms))) for start, end in at]
        )

    def _slot(self, number: int) -> str:
        return f"{self._slot_prefix}{number:06}"

    def _apply(
        self,
        messages: Messages,
        tools: Any,
        prompt: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
        marks: bool = False,
    ) -> Rendered:
        """The rendering and, with `marks`, the spans of its `{% generation %}` blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(tools=tools)
        try:
            with limited_rendering():
                texts, found = render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=template,
                    return_assistant_tokens_mask=marks and GENERATION.search(template) is not None,
                    add_generation_prompt=prompt,
                    **{**self._tokenizer.special_tokens_map, "strftime_now": TODAY.strftime, **variables},
                )
            check_size(texts[0])
        except Exception as error:
            # Templates raise their own errors, the engine's, or Python's.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template refuses a conversation ({reason})") from error
        return Rendered(texts[0], found[0] if found else [])

    def _guard(self, value: Any) -> Any:
        """The template's variables other than the messages' texts, with control tokens in them replaced by words."""
        if isinstance(value, str):
            return self.control.named(value, self._spares)
        if isinstance(value, list):
            return [self._guard(part) for part in value]
        return {self._guard(k): self._guard(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _as_spelled(self, text: str) -> str:
        return self._spare.sub(lambda found: self._spelled[found.group()], text)

    def _filled(self, skeleton: str, forms: list[str]) -> str:
        given = iter(forms)
        return self._slots.sub(lambda _: next(given), self._as_spelled(skeleton))

    def _forms(self, messages: Messages, plain: str, skeleton: str) -> list[str]:
        """The text of each slot of `skeleton`; with these texts it equals the rendering `plain`."""
        first, *pieces = self._slots.split(self._as_spelled(skeleton))
        forms, at = [], len(first)
        for number, written in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
            possible = _possible_forms(messages[number]["content"])
            form = next((form for form in possible if plain.startswith(form + written, at)), None)
            if form is None:
                _refuse(messages, number, "changes what {} says")
            forms.append(form)
            at += len(form) + len(written)
        if at != len(plain) or not plain.startswith(first):
            _refuse(messages, len(messages) - 1, "changes what {} says")
        return forms

    def _check_nothing_is_left_out(self, messages: Messages, skeleton: str) -> None:
        present = set(map(int, self._slots.findall(skeleton)))
        for number, message in enumerate(messages):
            if message["content"] and number not in present:
                _refuse(messages, number, "leaves out or changes what {} says")
            for key in ("tools", "tool_calls"):
                names = [self._guard((of.get("function") or of).get("name", "")) for of in message.get(key) or ()]
                if not all(name in skeleton for name in names):
                    _refuse(messages, number, f"leaves out {key} of {{}}")

    def _span(self, marked: Messages, tools: Any, rendered: Rendered, number: int) -> tuple[int, int]:
        """The span of reply `number` in a rendering of slots and names, with the end of its turn."""
        text, slot = rendered.text, self._slot(number)
        start = text.find(slot) if marked[number]["content"] else -1
        mark = _mark_of(marked, rendered.spans, number, start)
        if mark is not None:
            start, end = mark
            closing = self.control.find(text[start:end])[-1:]
            if closing and not text[start + closing[0][1] : end].strip():
                return start, end
        elif start < 0 or "tool_calls" in marked[number]:
            return self._span_by_prefix(marked, tools, text, number, start)
        else:
            end = start + len(slot)
        turn_end, next_slot = self.control.find(text[end:])[:1], self._slots.search(text, end)
        if not turn_end or (next_slot is not None and next_slot.start() < end + turn_end[0][0]):
            _refuse(marked, number, "ends what {} says with no special token, so nothing would stop a reply")
        return start, end + turn_end[0][1]

    def _span_by_prefix(self, marked: Messages, tools: Any, text: str, number: int, start: int) -> tuple[int, int]:
        """The span of a reply with tool calls, from renderings of the conversation without it and with it."""
        before = self._apply(marked[:number], tools, True).named(self.control).text
        rendering = self._apply(marked[: number + 1], tools, False).named(self.control).text
        rendering = rendering[: max((end for _, end, _ in self.control.find(rendering)), default=0)]
        start = len(before) if start < 0 else start
        if not rendering.startswith(before) or not text.startswith(rendering) or len(rendering) <= start:
            _refuse(marked, number, "does not show where the calls of {} begin and end: give it generation marks")
        return start, len(rendering)


def _mark_of(messages: Messages, marks: list[tuple[int, int]], number: int, slot: int) -> tuple[int, int] | None:
    """The `{% generation %}` block of reply `number`, whose text is at `slot` (-1: no text)."""
    if slot >= 0:
        return next(((start, end) for start, end in marks if start <= slot < end), None)
    assistants = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    return marks[assistants.index(number)] if len(marks) == len(assistants) else None


def _possible_forms(content: str) -> Iterator[str]:
    """The forms of a text in renderings: unchanged, without outer whitespace, as JSON (for tools' answers)."""
    yield content
    yield from (content.strip(), content.lstrip(), content.rstrip(), json.dumps(content, ensure_ascii=False)[1:-1])


def _refuse(messages: Messages, number: int, what: str) -> NoReturn:
    raise ValueError("the chat template " + what.format(f"message {number + 1} ({messages[number]['role']})"))


def _tokens_of(encoded: Encoded, span: tuple[int, int]) -> tuple[int, int]:
    """The tokens that cover a span. The first may begin before it if the tokenizer joins text across the boundary."""
    first = int(np.searchsorted(encoded.ends, span[0], side="right"))
    return first, int(np.searchsorted(encoded.starts, span[1], side="left"))
