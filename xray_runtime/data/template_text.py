"""A chat template's text of a conversation, in which only the template writes control tokens.

A template is rendered twice: with the messages, and with an unguessable word in place of each message's text. The
second rendering shows the template's own output: the control tokens, and the position of each text. With the texts
inserted it must equal the first rendering, apart from outer whitespace (Llama 3 and Gemma trim), or the template is
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from xray_runtime.data.control_tokens import ControlTokens, unguessable
from xray_runtime.data.pairs import Messages
from xray_runtime.data.pictures import PLACEHOLDER, PictureTokens, pictures_of
from xray_runtime.data.reasoning import CLOSE, KEY, split_reasoning
from xray_runtime.data.rendering_limit import check_size, limited_rendering
from xray_runtime.data.tokenizer import Tokenizer

TODAY = datetime(2024, 7, 26, tzinfo=UTC)
"""A fixed date for templates that write one; otherwise the same data would have other tokens the next day."""
USER_TURN, ASSISTANT_TURN = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
REASONING_KEYS = (KEY, "reasoning", "thinking")
"""Names under which templates read a message's reasoning."""
OF_REASONING = 500_000
"""The slot of a message's reasoning has the message's number and this."""
LEADING = "num_leading_pictures"
"""Key of a message whose text begins with so many pictures, for a template that reads parts."""
TAG = re.compile(r"<(\w+)>\s*\Z")
"""A tag that a template opens at the end of a prompt."""


_PICTURES = re.compile(f"^({re.escape(PLACEHOLDER)})+")


class Rendered(NamedTuple):
    """A conversation as text, with control tokens by their names."""

    text: str
    places: dict[int, tuple[int, int]]
    """Slot → (start, end) of its text, in characters."""


class ReasoningStyle(NamedTuple):
    """How a template writes reasoning."""

    key: str | None
    """The key of a message's reasoning; None: it only opens a block in prompts, and writes none in rows."""
    open: str
    close: str
    """The text before the reasoning, and the text before the answer, without outer whitespace."""
    opened: str
    """The end of every prompt, if that opens the reasoning; control tokens by their names."""


class TemplateText:
    """The renderings of a tokenizer's chat template. Every method raises a one-line ValueError if the template refuses
    a conversation, changes a message's text, or omits a message, a tool or a call."""

    def __init__(self, tokenizer: Tokenizer, control: ControlTokens) -> None:
        self._tokenizer, self._control = tokenizer, control
        secret = unguessable()
        self._slot_prefix, self._spare_prefix = f"{secret}a", f"{secret}b"
        self._slots = re.compile(f"{self._slot_prefix}([0-9]{{6}})")
        self._spares = {token: f"{self._spare_prefix}{number:06}" for number, token in enumerate(sorted(control.ids))}
        self._spelled = {spare: token for token, spare in self._spares.items()}
        self._spare = re.compile(f"{self._spare_prefix}[0-9]{{6}}")

    @cached_property
    def reasoning(self) -> ReasoningStyle | None:
        """None: the template knows no reasoning."""
        begun = self._control.named(self._apply([USER_TURN], None, True))
        shown = self._control.spelled(begun)
        tag = TAG.search(shown)
        for key in REASONING_KEYS:
            reply = {"role": "assistant", "content": self._slot(1), key: self._slot(1 + OF_REASONING)}
            try:
                text = self._control.named(self._apply([USER_TURN, reply], None, False))
            except ValueError:
                continue
            start, answer = text.find(reply[key]), text.find(reply["content"])
            if not 0 <= start < answer:
                continue
            close = self._control.spelled(text[start + len(reply[key]) : answer]).strip()
            thought = self._control.spelled(text[len(begun) : start]).strip() if text.startswith(begun) else ""
            if thought:
                return ReasoningStyle(key, thought, close, "")
            if tag is not None:
                return ReasoningStyle(key, tag[0].strip(), close, self._control.named(tag[0]))
        if tag is None or self._control.named(self._apply([USER_TURN, ASSISTANT_TURN], None, False)).startswith(begun):
            return None
        return ReasoningStyle(None, tag[0].strip(), f"</{tag[1]}>", self._control.named(tag[0]))

    def render(
        self,
        messages: Messages,
        prompt: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        sampled: bool = False,
    ) -> Rendered:
        """The conversation, with `prompt` up to the start of the assistant's reply; `variables` are the template's.

        A text that the template would change is refused. If the last message is a `sampled` reply, it is kept as the
        policy wrote it instead: a policy may write anything, such as a second `</think>`.
        """
        tools = messages[0].get("tools")
        texts = [self._as_read(message) for message in messages]
        plain = self._apply(texts, tools, prompt, variables)
        guarded = self._guard(tools)
        marked = [self._marked(number, message) for number, message in enumerate(texts)]
        skeleton = self._apply(marked, guarded, prompt, variables)
        self._check_nothing_is_left_out(messages, skeleton)
        forms = self._forms(texts, plain, skeleton)
        if forms is None and sampled:
            # Earlier messages are checked as ever, around a word in place of the reply.
            around = [*texts[:-1], marked[-1]]
            forms = self._forms(around, self._apply(around, tools, prompt, variables), skeleton)
            forms = forms and self._with_last(texts, forms, skeleton)
        if forms is None:
            number = self._first_changed(texts, marked, (guarded, prompt, variables), skeleton)
            refuse(messages, number, "changes what {} says")
        return self._filled(self._control.named(skeleton), forms, messages)

    def parts(self, message: dict[str, Any]) -> tuple[str | None, str]:
        """(reasoning or None, text) of a message. Reasoning at the beginning of an assistant's text, as many files have
        it, is taken apart for a template that knows reasoning; others get the text as it is."""
        reasoning, content = message.get(KEY), message["content"]
        if reasoning is None and message["role"] == "assistant" and CLOSE in content and self.reasoning is not None:
            return split_reasoning(content)
        return reasoning, content

    def _as_read(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template reads it."""
        message_read = {key: value for key, value in message.items() if key not in ("tools", "pictures", KEY)}
        reasoning, content = self.parts(message)
        if reasoning and self.reasoning is not None and self.reasoning.key is not None:
            message_read[self.reasoning.key] = reasoning
        if self._reads_parts and message.get("pictures"):
            # Such templates write a text behind a picture otherwise than one at the beginning.
            rest = _PICTURES.sub("", content)
            message_read[LEADING] = (len(content) - len(rest)) // len(PLACEHOLDER)
            content = rest
        return message_read | {"content": content}

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads lists of parts alone, as those of Idefics3 and SmolVLM do."""
        text = self._slot(1)
        try:
            return text not in self._render([USER_TURN | {"content": text}], None, False) and text in self._render(
                [_in_parts(USER_TURN | {"content": text})], None, False
            )
        except ValueError:
            return False

    def _marked(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        """The message with words in place of its texts, and of control tokens elsewhere."""
        slots = {key: self._slot(slot) for slot, key in self._keys(number) if message.get(key)}
        return dict(self._guard(message)) | slots

    def _keys(self, number: int) -> list[tuple[int, str]]:
        """(slot, key) of the texts of a message."""
        key = None if self.reasoning is None else self.reasoning.key
        return [(number, "content"), *([] if key is None else [(number + OF_REASONING, key)])]

    def _slot(self, number: int) -> str:
        return f"{self._slot_prefix}{number:06}"

    def _apply(
        self, messages: Messages, tools: Any, prompt: bool, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        given = list(map(_in_parts, messages)) if self._reads_parts else messages
        return self._render(given, tools, prompt, variables)

    def _render(
        self, messages: Messages, tools: Any, prompt: bool, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(tools=tools)
        try:
            with limited_rendering():
                texts, _ = render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=prompt,
                    **{**self._tokenizer.special_tokens_map, "strftime_now": TODAY.strftime, **variables},
                )
            return check_size(texts[0])
        except Exception as error:
            # Templates raise their own errors, the engine's, or Python's.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template refuses a conversation ({reason})") from error

    def _guard(self, value: Any) -> Any:
        """The template's variables other than the messages' texts, with control tokens in them replaced by words."""
        if isinstance(value, str):
            return self._control.named(value, self._spares)
        if isinstance(value, list):
            return [self._guard(part) for part in value]
        return {self._guard(k): self._guard(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _as_spelled(self, text: str) -> str:
        return self._spare.sub(lambda match: self._spelled[match.group()], text)

    def _filled(self, skeleton: str, forms: list[str], messages: Messages) -> Rendered:
        written, num_pictures = self._written_pictures(messages)
        text, *pieces = self._slots.split(self._as_spelled(skeleton))
        places: dict[int, tuple[int, int]] = {}
        for number, after, given in zip(map(int, pieces[::2]), pieces[1::2], forms, strict=True):
            has_pictures = number < OF_REASONING and messages[number].get("pictures")
            form = given.replace(PLACEHOLDER, written) if has_pictures else given
            places[number] = len(text), len(text) + len(form)
            text += form + after
        if num_pictures and text.count(written) != num_pictures:
            raise ValueError(f"the chat template leaves out some of the {num_pictures} pictures of a conversation")
        return Rendered(text, places)

    def _written_pictures(self, messages: Messages) -> tuple[str, int]:
        """(the control tokens of a picture, number of pictures)."""
        if not (num_pictures := len(pictures_of(messages))):
            return "", 0
        tokens = PictureTokens.of(self._tokenizer)
        if tokens is None:
            raise ValueError("the row has a picture, and this model reads text alone")
        return "".join(map(self._control.name_of, tokens.written)), num_pictures

    def _forms(self, texts: Messages, plain: str, skeleton: str) -> list[str] | None:
        """The text of each slot of `skeleton`, with which it equals the rendering `plain`; None: it does not."""
        first, *pieces = self._slots.split(self._as_spelled(skeleton))
        forms, at = [], len(first)
        for slot, written in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
            possible = _possible_forms(self._text_of(texts, slot))
            form = next((form for form in possible if plain.startswith(form + written, at)), None)
            if form is None:
                return None
            forms.append(form)
            at += len(form) + len(written)
        return forms if at == len(plain) and plain.startswith(first) else None

    def _with_last(self, texts: Messages, forms: list[str], skeleton: str) -> list[str]:
        """`forms`, with the last message's own texts."""
        slots = map(int, self._slots.findall(self._as_spelled(skeleton)))
        last = len(texts) - 1
        return [
            self._text_of(texts, slot) if slot % OF_REASONING == last else form
            for slot, form in zip(slots, forms, strict=True)
        ]

    def _text_of(self, texts: Messages, slot: int) -> str:
        number = slot % OF_REASONING
        return str(texts[number][dict(self._keys(number))[slot]])

    def _first_changed(self, texts: Messages, marked: Messages, given: tuple[Any, bool, Any], skeleton: str) -> int:
        """The message whose text alone, among words, is changed; the last one if none is."""
        tools, prompt, variables = given
        for number, message in enumerate(texts):
            alone = [*marked[:number], message, *marked[number + 1 :]]
            try:
                rendered = self._as_spelled(self._apply(alone, tools, prompt, variables))
            except ValueError:
                return number
            possible = [self._as_spelled(skeleton)]
            for slot, key in self._keys(number):
                forms = _possible_forms(message.get(key) or "")
                possible = [text.replace(self._slot(slot), form) for form in forms for text in possible]
            if rendered not in possible:
                return number
        return len(texts) - 1

    def _check_nothing_is_left_out(self, messages: Messages, skeleton: str) -> None:
        present = set(map(int, self._slots.findall(skeleton)))
        for number, message in enumerate(messages):
            if self._as_read(message)["content"] and number not in present:
                refuse(messages, number, "leaves out or changes what {} says")
            for key in ("tools", "tool_calls"):
                names = [self._guard((of.get("function") or of).get("name", "")) for of in message.get(key) or ()]
                if not all(name in skeleton for name in names):
                    refuse(messages, number, f"leaves out {key} of {{}}")


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the list of its parts in place of its text."""
    plain = {key: value for key, value in message.items() if key != LEADING}
    parts = [{"type": "image"}] * message.get(LEADING, 0)
    if message["content"] or not parts:
        parts.append({"type": "text", "text": message["content"]})
    return plain | {"content": parts}


def _possible_forms(text: str) -> Iterator[str]:
    """The forms of a text in renderings: unchanged, without outer whitespace or line ends, as JSON (for tools'
    answers)."""
    yield text
    for characters in (None, "\n"):
        yield from (text.strip(characters), text.lstrip(characters), text.rstrip(characters))
    yield json.dumps(text, ensure_ascii=False)[1:-1]


def refuse(messages: Messages, number: int, what: str) -> NoReturn:
    """Raise the ValueError that the chat template does `what` to {}, a message."""
    raise ValueError("the chat template " + what.replace("{}", f"message {number + 1} ({messages[number]['role']})", 1))
