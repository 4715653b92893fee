"""Conversations in tokens under a tokenizer's chat template, where a message cannot forge control tokens.

Ids are those of transformers' `apply_chat_template`, except that a message that spells a control token stays text
(`template_text`). A reply is what the policy would have to sample: everything that the template writes behind the
prompt, up to the end of the turn. Every method (SFT, preferences, reward models, rollouts, evaluation) takes it from
here, so that the tokens of a prompt and of the reply behind it are those of the row:

    prompt     <|im_start|>user ⏎ hi <|im_end|> ⏎ <|im_start|>assistant ⏎
    reply                                                                 <think> ⏎ … ⏎ </think> ⏎⏎ hello <|im_end|>

A template that opens the reasoning in prompts but writes none in rows (DeepSeek-R1) gets it in replies all the same:
its prompts are the template's, and behind them the reasoning, the end of its block, and what the row has. There and in
Qwen3's, a reply without reasoning has an empty block.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from xray_runtime.data.control_tokens import ControlTokens, Encoded
from xray_runtime.data.pairs import Messages
from xray_runtime.data.pictures import PictureTokens, pictures_of
from xray_runtime.data.reasoning import CLOSE, KEY, OPEN, split_reasoning
from xray_runtime.data.template_text import ASSISTANT_TURN, OF_REASONING, USER_TURN, TemplateText, refuse
from xray_runtime.data.tokenizer import Tokenizer

PARAMETERS = {"type": "object", "properties": {"c": {"type": "string", "description": "d"}}, "required": ["c"]}
TOOL = {"type": "function", "function": {"name": "call", "description": "e", "parameters": PARAMETERS}}
CALL = {"type": "function", "function": {"name": "call", "arguments": {"c": "f"}}}
HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
"""The form of tool calls of Hermes and Qwen: a JSON object with name and arguments."""


class Turns(NamedTuple):
    """A conversation, or a part of it, in tokens."""

    ids: list[int]
    spans: list[tuple[int, int]]
    """For each requested reply: its first token, and one past the end of its turn."""


class _TemplateRow(NamedTuple):
    """`Turns` as text, with control tokens by their names; spans in characters."""

    text: str
    spans: list[tuple[int, int]]
    messages: Messages


class _Reply(NamedTuple):
    """A prompt as text, the reply behind it with the end of its turn, and what the template writes after that."""

    before: str
    text: str
    rest: str


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The format of a tokenizer's current template. Raises ValueError as `ControlTokens`."""
    template = tokenizer.chat_template
    return _chat_format(tokenizer, template if isinstance(template, str) else json.dumps(template))


@lru_cache(maxsize=8)
def _chat_format(tokenizer: Tokenizer, template: str) -> ChatFormat:
    return ChatFormat(tokenizer)


class ChatFormat:
    """The chat template and the tokens of `tokenizer`. Every method raises a one-line ValueError if the template
    refuses a conversation, changes a message's text, omits a message, its reasoning, a tool or a call, or begins a
    reply otherwise than its prompt ends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.control = tokenizer, ControlTokens(tokenizer)
        self._template = TemplateText(tokenizer, self.control)

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
        turns = [USER_TURN, ASSISTANT_TURN]
        rendered = self._template.render(turns, False)
        if 1 not in rendered.places:
            refuse(turns, 1, "leaves out what {} says")
        tokens = self.control.find(rendered.text[rendered.places[1][1] :])
        if not tokens:
            refuse(turns, 1, "ends what {} says with no special token, so nothing would stop a reply")
        return tokens[0][2]

    @cached_property
    def _earlier(self) -> tuple[dict[str, Any], str]:
        """(a reply, with reasoning where the template knows that; its turn and the one before it as sampled)."""
        reply = ASSISTANT_TURN | ({} if self._template.reasoning is None else {KEY: "c"})
        before, text, _ = self._reply([USER_TURN], reply)
        return reply, before + text

    @cached_property
    def writes_hermes_calls(self) -> bool:
        """Whether the template shows tools, and writes calls as `HERMES`."""
        reply = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
        try:
            [ids] = self.replies([([USER_TURN | {"tools": [TOOL]}], reply)])
            return [json.loads(call) for call in HERMES.findall(self._tokenizer.decode(ids))] == [CALL["function"]] * 2
        except ValueError:
            return False

    def prompts(self, prompts: Sequence[Messages], **variables: Any) -> list[list[int]]:
        """Ids up to the start of the assistant's reply; `variables` are the template's."""
        texts = [self._template.render(messages, True, variables).text for messages in prompts]
        return [self._expanded(e.ids, m)[0] for e, m in zip(self.control.encode(texts), prompts, strict=True)]

    def _expanded(self, ids: list[int], messages: Messages) -> tuple[list[int], list[int]]:
        """`PictureTokens.expand`, where messages have pictures."""
        pictures, written = pictures_of(messages), PictureTokens.of(self._tokenizer)
        if not pictures or written is None:
            return ids, []
        return written.expand(ids, pictures)

    def replies(self, replies: Sequence[tuple[Messages, dict[str, Any]]], *, sampled: bool = False) -> list[list[int]]:
        """Ids of the assistant's messages behind their prompts, each with the end of its turn."""
        texts = [self._reply(prompt, message, sampled=sampled) for prompt, message in replies]
        leads = [self._lead(one.before) for one in texts]
        known = self._encoded_leads(leads)
        encoded = self.control.encode([lead + one.text for lead, one in zip(leads, texts, strict=True)])
        return [
            self._behind(known[lead], joint, one.text) for lead, one, joint in zip(leads, texts, encoded, strict=True)
        ]

    def turns(self, conversations: Sequence[tuple[Messages, Collection[int]]]) -> list[Turns]:
        """The replies with the given indices of each conversation, in order, in as few rows as possible: a row goes on
        as long as the next prompt begins with it. Qwen3 and DeepSeek-R1 leave out earlier reasoning, so that each of
        their replies is a row of its own."""
        rows = [row for messages, replies in conversations for row in self._rows(messages, replies)]
        known = self._encoded_leads([self._lead(row.text[:start]) for row in rows for start, _ in row.spans])
        encoded = self.control.encode([row.text for row in rows])
        return [
            self._with_pictures(turns, row)
            for row, joint in zip(rows, encoded, strict=True)
            for turns in self._tokens(row, joint, known)
        ]

    def _with_pictures(self, turns: Turns, row: _TemplateRow) -> Turns:
        if not pictures_of(row.messages):
            return turns
        ids, places = self._expanded(turns.ids, row.messages)
        return Turns(ids, [(places[start], places[end]) for start, end in turns.spans])

    def wholes(self, conversations: Sequence[Messages]) -> list[list[int]]:
        """Ids of conversations with a sampled reply to their last character, as other trainers' reward models read
        them."""
        texts = [self._template.render(messages, False, sampled=True).text for messages in conversations]
        return [self._expanded(e.ids, m)[0] for e, m in zip(self.control.encode(texts), conversations, strict=True)]

    def observations(self, messages: Messages, last: int) -> list[int]:
        """Ids of the messages between two replies, up to the start of the next reply.

        Args:
            last: last token of the previous reply; if it does not end the turn, the ids begin with the end of turn.

        Raises:
            ValueError: see the class; also if the template changes earlier turns, so that sampled tokens would differ
            when they are encoded again.
        """
        reply, known = self._earlier
        text = self._template.render([USER_TURN, reply, *messages], True).text
        if not text.startswith(known):
            left_out = " (it leaves out earlier reasoning)" if KEY in reply else ""
            raise ValueError(f"the chat template writes a turn differently once another follows it{left_out}")
        [encoded] = self.control.encode([self.control.name_of(self.end_of_turn) + text[len(known) :]])
        return encoded.ids[1:] if last == self.end_of_turn else encoded.ids

    def texts(self, replies: Sequence[Sequence[int]]) -> list[str]:
        """The text of each reply without special tokens, with its reasoning in the form of `data.reasoning`."""
        rows = [[number for number in map(int, ids) if number not in self._hidden] for ids in replies]
        texts: list[str] = self._tokenizer.batch_decode(rows) if rows else []
        return [self.with_marks(text) for text in texts]

    def num_reasoning(self, ids: Sequence[int]) -> int:
        """How many tokens of a reply its reasoning has, with those around it; 0: it has none."""
        reasoning, answer = split_reasoning(self.texts([ids])[0])
        if reasoning is None:
            return 0

        def is_closed(count: int) -> bool:
            return CLOSE in self.texts([ids[:count]])[0]

        return bisect_left(range(len(ids)), True, key=is_closed) if answer else len(ids)

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """The special tokens, which texts do not show, apart from those around reasoning."""
        style = self._template.reasoning
        marks = self.control.named(" ".join([OPEN, CLOSE, *([] if style is None else [style.open, style.close])]))
        shown = {number for _, _, number in self.control.find(marks)}
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(number for number, token in added if token.special and number not in shown)

    @property
    def marks_are_special(self) -> bool:
        """Whether decoding without special tokens loses where reasoning begins and ends."""
        tokens = self._tokenizer.added_tokens_decoder.items()
        return any(token.special and number not in self._hidden for number, token in tokens)

    def with_marks(self, text: str) -> str:
        """A decoded reply with the marks of `data.reasoning` in place of the template's."""
        style = self._template.reasoning
        if style is None:
            return text
        if style.opened:
            text = f"{style.open}\n{text}"
        if (style.open, style.close) == (OPEN, CLOSE) or not text.lstrip().startswith(style.open):
            return text
        return text.replace(style.open, OPEN, 1).replace(style.close, CLOSE, 1)

    def _reply(self, prompt: Messages, reply: dict[str, Any], *, sampled: bool = False) -> _Reply:
        conversation, number, style = [*prompt, reply], len(prompt), self._template.reasoning
        reasoning, _ = self._template.parts(reply)
        before = self._template.render(prompt, True).text if prompt else ""
        rendered = self._template.render(conversation, False, sampled=sampled)
        if reasoning and style is None:
            refuse(conversation, number, f"leaves out {KEY} of {{}}: use one that writes it, as chatml does")
        if reasoning and style is not None:
            if CLOSE in reasoning or style.close in reasoning:
                where = f"{KEY} of message {number + 1} (assistant)"
                raise ValueError(f"{where} contains {style.close}, where it would end")
            if style.key is not None and number + OF_REASONING not in rendered.places:
                refuse(conversation, number, f"leaves out {KEY} of {{}}")
        begun, block = before, ""
        if style is not None and style.key is None:
            begun = before.removesuffix(style.opened)
            block = f"{reasoning or ''}\n{self.control.named(style.close)}\n\n"
        if not rendered.text.startswith(begun):
            same = _common_length(begun, rendered.text)
            ends, begins = (self.control.spelled(text[same:])[:40] for text in (begun, rendered.text))
            refuse(conversation, number, f"begins {{}} with {begins!r} in a row, and with {ends!r} in a prompt")
        written = [end for slot, (_, end) in rendered.places.items() if slot % OF_REASONING == number]
        end = self._end_of(conversation, rendered.text, max([len(begun), *written]))
        return _Reply(before, block + rendered.text[len(begun) : end], rendered.text[end:])

    def _end_of(self, conversation: Messages, text: str, at: int) -> int:
        """The end of the turn that `text` ends with, whose message's own texts end at `at`."""
        tokens = self.control.find(text[at:])
        ends = [end for _, end, number in tokens if number == self.end_of_turn]
        # Some templates end a turn with calls otherwise.
        ends += [end for _, end, _ in tokens[-1:]]
        if not ends:
            what = "ends what {} says with no special token, so nothing would stop a reply"
            refuse(conversation, len(conversation) - 1, what)
        return at + ends[0]

    def _rows(self, messages: Messages, replies: Collection[int]) -> list[_TemplateRow]:
        rows: list[_TemplateRow] = []
        for number in sorted(replies):
            before, text, rest = self._reply(messages[:number], messages[number])
            goes_on = rows and before.startswith(rows[-1].text[: rows[-1].spans[-1][1]])
            spans = rows.pop().spans if goes_on else []
            span = len(before), len(before + text)
            rows.append(_TemplateRow(before + text + rest, [*spans, span], messages[: number + 1]))
        return rows

    def _tokens(self, row: _TemplateRow, joint: Encoded, known: dict[str, list[int]]) -> list[Turns]:
        """The tokens of a row; a row for each reply if a token spans one and the prompt before it."""
        spans = []
        for start, end in row.spans:
            first = int(np.searchsorted(joint.ends, start, side="right"))
            lead = known[self._lead(row.text[:start])]
            if first < len(lead) or joint.ids[first - len(lead) : first] != lead:
                return [self._apart(row.text[:start], row.text[start:end]) for start, end in row.spans]
            spans.append((first, int(np.searchsorted(joint.starts, end, side="left"))))
        return [Turns(joint.ids, spans)]

    def _apart(self, before: str, reply: str) -> Turns:
        lead = self._lead(before)
        prompt, of_lead, joint = self.control.encode([before, lead, lead + reply])
        ids = self._behind(of_lead.ids, joint, reply)
        return Turns([*prompt.ids, *ids], [(len(prompt.ids), len(prompt.ids) + len(ids))])

    def _behind(self, lead: list[int], joint: Encoded, reply: str) -> list[int]:
        """Ids of a reply behind the tokens `lead`; `joint` encodes both together."""
        if joint.ids[: len(lead)] == lead:
            return joint.ids[len(lead) :]
        # A token would span prompt and reply, but the prompt's tokens are fixed: encode the reply alone.
        [encoded] = self.control.encode([self.control.name_of(self.end_of_turn) + reply])
        return encoded.ids[1:]

    def _lead(self, before: str) -> str:
        """The text before a reply from the last control token on, which no token spans."""
        return before[max((start for start, _, _ in self.control.find(before)), default=0) :]

    def _encoded_leads(self, leads: Collection[str]) -> dict[str, list[int]]:
        distinct = list(dict.fromkeys(leads))
        return {lead: encoded.ids for lead, encoded in zip(distinct, self.control.encode(distinct), strict=True)}


def _common_length(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
