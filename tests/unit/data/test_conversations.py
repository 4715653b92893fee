"""Rows of SFT: pairs of one conversation become one row again, and only what the assistant said counts in it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xray_runtime.data import conversations as module, tokens
from xray_runtime.data.batching import Cursor
from xray_runtime.data.conversations import ConversationTokens, conversations
from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.pairs import Example, Pairs, write_pairs
from xray_runtime.data.reading.records import prompt_and_replies
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.methods.sft import body as sft
from xray_runtime.methods.sft.config import SFTConfig

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Pau"}}}
SAID = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine thanks"},
    {"role": "user", "content": "what is the weather"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny\n"},
    {"role": "assistant", "content": "sunny <|end|> it is"},
]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["how are you", "fine thanks", "what is the weather like today", "sunny"] * 3, 300)


def examples(name: str, context: int | None, messages: list[dict[str, Any]] = SAID) -> list[Example]:
    pairs = prompt_and_replies("row", {"messages": messages, "tools": TOOLS}, context)
    return [Example(f"{name}-{i}", name, p, r["content"], r.get("tool_calls")) for i, (p, r) in enumerate(pairs)]


def test_a_conversation_is_one_row() -> None:
    found = list(conversations([*examples("a", None), *examples("b", None)]))
    assert [one.replies for one in found] == [[2, 4, 6], [2, 4, 6]]
    assert found[0].messages == [SAID[0] | {"tools": TOOLS}, *SAID[1:]]
    # With one message of context a prompt has lost what was said before it; a tool's use stays together.
    assert [one.replies for one in conversations(examples("a", 1))] == [[2], [2, 4]]
    # Equal beginnings of different conversations are not joined.
    first, *_ = examples("a", None)
    assert len(list(conversations([first, first._replace(conversation="b")]))) == 2


def test_a_walk_in_order_begins_again_in_order() -> None:
    cursor = Cursor(5, seed=3, shuffled=False)
    assert cursor.take(3) == [0, 1, 2]
    assert cursor.take(9) == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_a_reply_that_was_dropped_is_read_and_not_learned() -> None:
    first, _, last = examples("a", None)
    [found] = conversations([first, last])
    assert found.replies == [2, 6]
    assert found.messages[1:] == SAID[1:]


def test_prompts_without_a_reply_are_no_rows(tmp_path: Path, tokenizer: Any) -> None:
    alone = Example("b-0", "b", SAID[1:2], "")
    first, *_ = examples("a", None)
    thought = first._replace(reasoning_content="hm")
    assert [one.ids for one in conversations([alone, first])] == [["a-0"]]
    assert next(conversations([thought])).messages[-1] == SAID[2] | {"reasoning_content": "hm"}
    for side in ("train", "heldout"):
        write_pairs(tmp_path / f"{side}.arrow", Example, [alone, alone._replace(id="b-1")])
    found = ConversationTokens(tmp_path / "train.arrow", tokenizer, 10_000, 10_000, process_seal())
    assert (len(found), found.num_replies, found.num_all) == (0, 0, 0)
    inputs = SimpleNamespace(data=SimpleNamespace(path=tmp_path))
    stage = SimpleNamespace(name="sft", inputs=inputs, config=SFTConfig(), seal=process_seal())
    with pytest.raises(ValueError, match="sft: the training rows of the dataset are prompts without replies: add rows"):
        sft._data(stage, tokenizer, (100, 100), SimpleNamespace(progress=lambda *values: None))


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven conversations in shards of 2."""
    for place in (tokens, module):
        monkeypatch.setattr(place, "SHARD_ROWS", 2)
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "train.arrow"
    write_pairs(path, Example, [e for i in range(7) for e in examples(f"c{i}", None, SAID if i % 2 else SAID[:3])])
    return path


def test_the_mask_is_what_the_assistant_said(dataset: Path, tokenizer: Any) -> None:
    found = ConversationTokens(dataset, tokenizer, 10_000, 10_000, process_seal())
    assert (len(found), found.num_replies, sum(found.num_dropped.values())) == (7, 13, 0)
    rows = found.take([3, 6, 0])
    masks = list(rows.response_mask)
    assert [len(mask) for mask in masks] == (rows.input_ids.lengths - rows.prompt_lengths).tolist()
    assert rows.num_response_tokens() == sum(int(mask.sum()) for mask in masks)
    said = []
    for ids, prompt, mask in zip(rows.input_ids, rows.prompt_lengths, masks, strict=True):
        assert mask[0]
        assert mask[-1]
        parts = np.split(ids[prompt:], np.flatnonzero(np.diff(mask)) + 1)
        said.append([tokenizer.decode(part) for part in parts[::2]])
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pau"}}\n</tool_call><|end|>'
    assert said == [
        ["fine thanks<|end|>", call, "sunny <|end|> it is<|end|>"],
        ["fine thanks<|end|>"],
        ["fine thanks<|end|>"],
    ]
    whole = [SAID[0], *SAID[1:-1], SAID[-1] | {"content": "sunny"}]
    encoded = tokenizer.apply_chat_template(whole, tools=TOOLS)["input_ids"]
    # Up to what the last one spells, which transformers would make a token of.
    same = len(encoded) - 1
    assert next(iter(rows.input_ids))[:same].tolist() == encoded[:same]


def test_conversations_with_too_many_tokens_are_left_out(dataset: Path, tokenizer: Any) -> None:
    whole = ConversationTokens(dataset, tokenizer, 10_000, 10_000, process_seal()).take(range(7))
    first = int(whole.prompt_lengths[1])
    # Only the first reply has so few tokens before it: rows end with it.
    found = ConversationTokens(dataset, tokenizer, first, 10_000, process_seal())
    assert (len(found), found.num_replies, found.num_dropped) == (7, 7, {"prompt_too_long": 6, "reply_too_long": 0})
    with DroppedRows(dataset.parent) as dropped:
        found.list_dropped(dropped)
    listed = [json.loads(line) for line in (dataset.parent / "dropped.jsonl").read_text().splitlines()]
    names = [example.id for example in Pairs(dataset, Example) if len(example.prompt) > 2]
    assert sorted(row["id"] for row in listed) == sorted(names)
    assert {row["reason"] for row in listed} == {"prompt_too_long"}
    assert all(row["tokens"] > first for row in listed)
    assert {tokenizer.decode(ids[-1:]) for ids in found.take(range(7)).input_ids} == {"<|end|>"}
    # The call is longer than any of the other replies; what follows it is learned with it in view.
    of_reply = len(tokenizer("sunny <|end|> it is", split_special_tokens=True)["input_ids"]) + 1
    found = ConversationTokens(dataset, tokenizer, 10_000, of_reply, process_seal())
    assert (len(found), found.num_replies, found.num_dropped["reply_too_long"]) == (7, 10, 3)
    assert found.take([1]).input_ids.lengths.tolist() == whole.input_ids.lengths[1:2].tolist()
    # The end of each reply is that of its row up to there; of one that is left out there is none.
    assert (int((found.ends == 0).sum()), int(found.ends.max())) == (
        3,
        int(found.take(range(7)).input_ids.lengths.max()),
    )
    longest = int(found.ends.argmax())
    assert found.id(longest) == list(found._names())[longest]
    assert len(ConversationTokens(dataset, tokenizer, 1, 10_000, process_seal())) == 0
