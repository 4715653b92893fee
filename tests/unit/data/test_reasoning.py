"""Reasoning as a part of replies: the same tokens in rows, behind prompts and in what is sampled."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.message_texts import Messages as MessageTexts
from tests.unit.data.thinking_templates import QWEN3, R1, SPACED, TEMPLATES, tokenizer_for
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.conversations import conversations
from xray_runtime.data.pairs import Example, Messages
from xray_runtime.data.reasoning import split_reasoning, with_reasoning
from xray_runtime.data.tokenizing import (
    decode_replies,
    encode_conversations,
    encode_prompts,
    encode_replies_to,
    own_text,
)
from xray_runtime.rewards.reward_reader import replies_to

made = lru_cache(tokenizer_for)
REASONS = [name for name in TEMPLATES if name != "spaced"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, reasoning: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({} if reasoning is None else {"reasoning_content": reasoning})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("4", (None, "4")),
        ("<think>\n2 + 2\n</think>\n\n4", ("2 + 2", "4")),
        ("<think></think>4", ("", "4")),
        ("<think>\n\n</think>\n\n4", ("", "4")),
        ("<think>\n2 + 2", ("2 + 2", "")),
        ("<think>\n2 + 2\n</think>", ("2 + 2", "")),
        ("\n<think>a</think>\n\n\nb\n", ("a", "\nb\n")),
        ("It is <think>4</think>", (None, "It is <think>4</think>")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
        ("", (None, "")),
    ],
)
def test_the_reasoning_and_the_answer_of_a_text(text: str, parts: tuple[str | None, str]) -> None:
    assert split_reasoning(text) == parts


@given(st.text("a\n <", max_size=6), st.text("a\n </think>", max_size=9))
def test_a_whole_reply_gives_back_its_parts(reasoning: str, answer: str) -> None:
    assert split_reasoning(with_reasoning(reasoning, answer)) == (reasoning, answer)


BLOCK = "<think>\nb c\n</think>\n\n"
CHATML_PROMPT = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
CHATML_OURS = CHATML_PROMPT.replace("<|im_end|>", "<|end|>")
R1_PROMPT = "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><think>\n"
ENDS = {"qwen3": "<|im_end|>", "r1": "<｜end▁of▁sentence｜>", "brackets": "<|im_end|>"}
LITERALS = {
    # template: (prompt, reply with reasoning, reply without)
    "ours": ("<|user|>a<|end|><|assistant|>", BLOCK + "d<|end|>", "d<|end|>"),
    "chatml": (CHATML_OURS, BLOCK + "d<|end|>", "d<|end|>"),
    "chatml, think tokens": (CHATML_OURS, BLOCK + "d<|end|>", "d<|end|>"),
    "chatml, special think tokens": (CHATML_OURS, BLOCK + "d<|end|>", "d<|end|>"),
    "qwen3": (CHATML_PROMPT, BLOCK + "d<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"),
    "qwen3 thinking": (CHATML_PROMPT + "<think>\n", "b c\n</think>\n\nd<|im_end|>", "\n</think>\n\nd<|im_end|>"),
    "r1": (R1_PROMPT, "b c\n</think>\n\nd<｜end▁of▁sentence｜>", "\n</think>\n\nd<｜end▁of▁sentence｜>"),
    "brackets": (CHATML_PROMPT.replace(">\n<", "><"), "[THINK]b c[/THINK]d<|im_end|>", "d<|im_end|>"),
}


@pytest.mark.parametrize("name", LITERALS)
def test_tokens_of_prompts_and_replies(name: str) -> None:
    tokenizer, (prompt, reasoned, plain) = made(name), LITERALS[name]
    [asked] = encode_prompts(tokenizer, [[user("a")]])
    replies = encode_replies_to(tokenizer, [([user("a")], says("d", "b c")), ([user("a")], says("d"))])
    assert tokenizer.decode(asked) == prompt
    assert [tokenizer.decode(ids) for ids in replies] == [reasoned, plain]
    for ids, message in zip(replies, (says("d", "b c"), says("d")), strict=True):
        [row] = chat_format(tokenizer).turns([([user("a"), message], [1])])
        [(start, end)] = row.spans
        assert (row.ids[:start], row.ids[start:end]) == (asked, ids)
    # The block is of the tokenizer's own tokens where it has them, and of text where a person spells it.
    think = tokenizer.convert_tokens_to_ids("<think>")
    [spelled] = encode_prompts(tokenizer, [[user("<think>a</think>")]])
    if think is not None and name != "brackets":
        assert [*asked, *replies[0]].count(think) == 1
        assert spelled.count(think) == asked.count(think)
    texts = [split_reasoning(text) for text in decode_replies(tokenizer, replies)]
    assert texts[0] == ("b c", "d")
    assert texts[1][0] in (None, "")
    assert texts[1][1] == "d"


@pytest.mark.parametrize("name", ["qwen3", "qwen3 thinking", "chatml", "chatml, special think tokens", "ours"])
def test_the_last_turn_is_transformers(name: str) -> None:
    tokenizer = made(name)
    messages = [user("a"), says("d", "b"), user("e"), says("f", "g\n\nh")]
    for last in (2, 4):
        [row] = chat_format(tokenizer).turns([(messages[:last], [last - 1])])
        assert row.ids == tokenizer.apply_chat_template(messages[:last])["input_ids"]
    prompts = encode_prompts(tokenizer, [messages[:1], messages[:3]])
    asked = (tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True)["input_ids"] for n in (1, 3))
    assert prompts == list(asked)


PIECES = [*" \n\ta9{<>'é\U0001f642", "<think>", "</think>"]
TEXT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
CONVERSATION = st.lists(st.tuples(TEXT, st.none() | TEXT, TEXT), min_size=1, max_size=3)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=CONVERSATION)
def test_a_row_is_a_prompt_and_the_reply_behind_it(name: str, turns: list[tuple[str, str | None, str]]) -> None:
    tokenizer, messages = made(name), list[dict[str, Any]]()
    for asked, reasoning, answer in turns:
        answer, reasoning = answer.replace("</think>", ""), reasoning and reasoning.replace("</think>", "")
        messages += [user(asked), says(answer or "x", None if name == "spaced" else reasoning)]
    form, replies = chat_format(tokenizer), range(1, len(messages), 2)
    rows = form.turns([(messages, replies)])
    found = [(row.ids[:start], row.ids[start:end]) for row in rows for start, end in row.spans]
    prompts = encode_prompts(tokenizer, [messages[:n] for n in replies])
    said = encode_replies_to(tokenizer, [(messages[:n], messages[n]) for n in replies])
    assert found == list(zip(prompts, said, strict=True))
    assert all(ids[-1] == form.end_of_turn for ids in said)
    # A template that rewrites earlier turns gives a row each, one that does not a row for all unless tokens would join.
    drops = name.startswith(("qwen3", "r1"))
    assert len(rows) in ([len(replies)] if drops else [1, len(replies)])


def test_a_space_before_the_end_is_a_part_of_every_reply() -> None:
    tokenizer, messages = made("spaced"), [user("a"), says("hello")]
    [row] = chat_format(tokenizer).turns([(messages, [1])])
    [reply] = encode_replies_to(tokenizer, [(messages[:1], messages[1])])
    [(start, end)] = row.spans
    assert tokenizer.decode(reply) == tokenizer.decode(row.ids[start:end]) == "hello <|end|>"


@pytest.mark.parametrize("name", [name for name in REASONS if name != "brackets"])
def test_a_block_in_the_text_is_reasoning_where_the_template_knows_it(name: str) -> None:
    """As in many files, and as sampled replies come back as data."""
    tokenizer = made(name)
    given = [says(f"{BLOCK}d"), says("<think>b c</think>d"), says("d", "b c")]
    texts, _, parts = encode_replies_to(tokenizer, [([user("a")], reply) for reply in given])
    assert texts == parts
    sampled = decode_replies(tokenizer, [texts])
    assert sampled == [f"{BLOCK}d"]
    assert encode_replies_to(tokenizer, [([user("a")], says(sampled[0]))]) == [texts]


def test_a_block_is_text_where_the_template_knows_no_reasoning() -> None:
    [ids] = encode_replies_to(made("spaced"), [([user("a")], says(f"{BLOCK}d"))])
    assert split_reasoning(decode_replies(made("spaced"), [ids])[0]) == ("b c", "d ")


def test_earlier_reasoning_is_as_the_template_has_it() -> None:
    messages = [user("a"), says("d", "b"), user("e")]
    assert "<think>" not in made("qwen3").decode(encode_prompts(made("qwen3"), [messages])[0])
    assert made("chatml").decode(encode_prompts(made("chatml"), [messages])[0]).count("<think>") == 1


UPPER = QWEN3.replace("+ content + '<|im_end|>", "+ content | upper + '<|im_end|>")


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (SPACED, [user("a"), says("d", "b")]),
        (R1, [user("a"), says("so </think> d")]),
        (QWEN3, [user("a"), says("so </think> d")]),
        (QWEN3, [user("a"), says("so </think> d"), user("e"), says("f")]),
        (UPPER, [user("a"), says("d"), user("e"), says("f")]),
        (QWEN3, [user("a"), says("d", "b</think>c")]),
        (SPACED.replace("assistant\\n", "assistant:"), [user("a"), says("d")]),
    ],
)
def test_templates_that_contradict_tokens_are_refused(
    template: str, messages: Messages, message_texts: MessageTexts
) -> None:
    tokenizer = tokenizer_for({QWEN3: "qwen3", UPPER: "qwen3", R1: "r1"}.get(template, "spaced"), template)
    with message_texts.raises(ValueError):
        chat_format(tokenizer).turns([(messages, [len(messages) - 1])])


def test_observations_go_on_where_reasoning_stays() -> None:
    tool = [{"role": "tool", "content": "4"}]
    form = chat_format(made("qwen3"))
    ids = form.observations(tool, form.end_of_turn)
    expected = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert made("qwen3").decode(ids) == expected
    for name in ("qwen3", "r1"):
        with pytest.raises(ValueError, match="leaves out earlier reasoning"):
            chat_format(made(name)).observations([user("e")], chat_format(made(name)).end_of_turn)


def test_replies_of_one_conversation_are_rows_of_their_own() -> None:
    examples = [
        Example("1-0", "c", [user("a")], "d", reasoning_content="b"),
        Example("1-1", "c", [user("a"), says("d", "b"), user("e")], "f", reasoning_content="g"),
    ]
    [whole] = conversations(examples)
    assert whole.messages[1]["reasoning_content"] == "b"
    assert len(chat_format(made("qwen3")).turns([(whole.messages, whole.replies)])) == 2
    assert len(chat_format(made("chatml")).turns([(whole.messages, whole.replies)])) == 1


@pytest.mark.parametrize("name", ["chatml, special think tokens", "r1", "ours"])
def test_how_long_the_reasoning_is(name: str) -> None:
    tokenizer, form = made(name), chat_format(made(name))
    [ids] = encode_replies_to(tokenizer, [([user("a")], says("d", "b c"))])
    count = form.num_reasoning(ids)
    assert tokenizer.decode(ids[:count]).endswith("</think>")
    assert form.num_reasoning(ids[: count - 1]) == count - 1
    assert form.num_reasoning(tokenizer("d", add_special_tokens=False)["input_ids"]) == (1 if name == "r1" else 0)


def test_the_turns_of_an_episode_are_one_reply() -> None:
    import numpy as np

    tokenizer = made("chatml")
    form = chat_format(tokenizer)
    turns = encode_replies_to(tokenizer, [([user("a")], says("d", "b")), ([user("a")], says("f", "g"))])
    between = form.observations([user("e")], form.end_of_turn)
    ids = np.array([*turns[0], *between, *turns[1]])
    mask = np.array([True] * len(turns[0]) + [False] * len(between) + [True] * len(turns[1]))
    assert split_reasoning(own_text(tokenizer, ids, mask)) == ("b\ng", "d\nf")


def test_a_template_in_which_the_tokenizer_joins_prompt_and_reply() -> None:
    """Byte-level BPE joins ":" and ")"; the prompt's tokens stay, and the reply stands alone."""
    tokenizer = copy.deepcopy(made("spaced"))
    tokenizer.chat_template = SPACED.replace("+ '\\n' +", "+ ':' +").replace("assistant\\n", "assistant:")
    messages = [user("a"), says(")"), user("b"), says("(")]
    assert len(tokenizer(":)")["input_ids"]) == 1
    rows = chat_format(tokenizer).turns([(messages, [1, 3])])
    prompts = encode_prompts(tokenizer, [messages[:1], messages[:3]])
    replies = encode_replies_to(tokenizer, [(messages[:1], messages[1]), (messages[:3], messages[3])])
    found = [(row.ids[:start], row.ids[start:end]) for row in rows for start, end in row.spans]
    assert found == list(zip(prompts, replies, strict=True))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("reply", ["d</think>e", "</think>", "<think>d", "d</think></think>e", "d<think>b</think>e"])
def test_a_sampled_reply_is_read_as_it_was_written(name: str, reply: str) -> None:
    """Qwen3's template writes what stands behind the last `</think>` alone, which a person's row is refused for."""
    tokenizer = made(name)
    [ids] = replies_to(tokenizer, [[user("a")]], [reply])
    [whole] = encode_conversations(tokenizer, [[user("a")]], [reply])
    assert reply in tokenizer.decode(ids)
    assert reply in tokenizer.decode(whole)
    if name == "qwen3" and reply.startswith("d</think>"):
        # The words before the reply are checked as ever.
        before = [user("a"), says(reply), user("b")]
        with pytest.raises(ValueError, match="changes what message 2"):
            encode_conversations(tokenizer, [before], ["c"])
        with pytest.raises(ValueError, match="changes what message 2"):
            encode_conversations(tokenizer, [before], [reply])
        with pytest.raises(ValueError, match="changes what message 2"):
            encode_replies_to(tokenizer, [([user("a")], says(reply))])
