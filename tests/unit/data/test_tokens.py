"""Tokens on disk: the same as encoding each pair by itself, made once, made again when damaged or of something else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data.encoding import encode_replies
from xray_runtime.data import tokens as module
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import Example, PreferenceExample, write_pairs
from xray_runtime.data.tokenizing import encode_prompts, train_tokenizer
from xray_runtime.data.tokens import Tokens
from xray_runtime.kernel.store.seal import Seal, process_seal
from xray_runtime.models.causal_lm import load_tokenizer

TEXTS = ["how are you", "fine thanks", "what is the weather like today", "sunny", ""]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TEXTS * 3, 300)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """23 pairs with four different prompts, in shards of 5."""
    monkeypatch.setattr(module, "SHARD_ROWS", 5)
    monkeypatch.setattr("xray_runtime.data.pairs.BATCH_ROWS", 5)
    (tmp_path / "data").mkdir()
    write_pairs(tmp_path / "data" / "train.arrow", Example, EXAMPLES)
    return tmp_path / "data" / "train.arrow"


EXAMPLES = [
    Example(str(i), "c", [{"role": "user", "content": TEXTS[i % 4]}], f"{TEXTS[i % 5]} {i}" if i % 5 < 4 else "")
    for i in range(23)
]


def files(dataset: Path) -> list[Path]:
    return sorted(dataset.parent.with_name(f"{dataset.parent.name}.tokens-").glob("*.arrow"))


def test_rows_are_the_encoded_pairs(dataset: Path, tokenizer: Any) -> None:
    tokens = Tokens(dataset, Example, tokenizer, process_seal())
    assert len(tokens) == 23
    order = [22, 0, 4, 5, 0, 13]
    rows = tokens.take(order)
    prompts = encode_prompts(tokenizer, [EXAMPLES[i].prompt for i in order])
    replies = encode_replies(tokenizer, [EXAMPLES[i].response for i in order])
    assert [ids.tolist() for ids in rows.input_ids] == [p + r for p, r in zip(prompts, replies, strict=True)]
    assert rows.prompt_lengths.tolist() == list(map(len, prompts))
    assert {rows.input_ids.values.dtype, rows.prompt_lengths.dtype} == {np.dtype(np.int64)}
    assert [tokens.prompt(i) for i in order] == prompts


def test_which_prompts_differ(dataset: Path, tokenizer: Any) -> None:
    tokens = Tokens(dataset, Example, tokenizer, process_seal())
    prompts = [len(ids) for ids in encode_prompts(tokenizer, [e.prompt for e in EXAMPLES])]
    longest = sorted(set(prompts))[-2]
    assert tokens.different_prompts(max(prompts)).tolist() == [0, 1, 2, 3]
    assert tokens.different_prompts(longest).tolist() == [i for i in range(4) if prompts[i] <= longest]


def test_preferences_have_both_sides(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "data").mkdir()
    prompt = [{"role": "user", "content": TEXTS[0]}]
    write_pairs(tmp_path / "data" / "p", PreferenceExample, [PreferenceExample("0", prompt, TEXTS[1], TEXTS[3])])
    rows = Tokens(tmp_path / "data" / "p", PreferenceExample, tokenizer, process_seal()).take([0])
    [ids], [chosen, rejected] = encode_prompts(tokenizer, [prompt]), encode_replies(tokenizer, [TEXTS[1], TEXTS[3]])
    assert [side.values.tolist() for side in rows.sides()] == [ids + chosen, ids + rejected]


def test_replies_that_call_tools_are_turns_of_their_conversations(tmp_path: Path, tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Pau <|end|>"}}}
    prompt = [{"role": "user", "content": TEXTS[2], "tools": [call]}]
    pairs = [
        PreferenceExample("0", prompt, "", "sunny", [call]),
        PreferenceExample("1", prompt, "sunny", "fine", None, [call, call]),
    ]
    (tmp_path / "data").mkdir()
    write_pairs(tmp_path / "data" / "p", PreferenceExample, pairs)
    rows = Tokens(tmp_path / "data" / "p", PreferenceExample, tokenizer, process_seal()).take([0, 1])
    form, start = chat_format(tokenizer), rows.prompt_lengths[0]
    chosen, rejected = [("", [call]), ("sunny", None)], [("sunny", None), ("fine", [call, call])]
    for side, replies in zip(rows.sides(), (chosen, rejected), strict=True):
        for ids, (text, calls) in zip(side, replies, strict=True):
            reply = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
            [turns] = form.turns([([*prompt, reply], [1])])
            assert ids.tolist() == turns.ids
            assert turns.spans == [(start, len(ids))]


def test_they_are_made_once(dataset: Path, tokenizer: Any, tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    first, second = tmp_path / "first", tmp_path / "second"
    tokenizer.save_pretrained(first)
    Tokens(dataset, Example, load_tokenizer(first), process_seal(), lambda done, total: said.append((done, total)))
    assert said == [(0, 23), (5, 23), (10, 23), (15, 23), (20, 23), (23, 23)]
    [path] = files(dataset)
    before = path.stat()
    # The same tokenizer, as a later stage has it.
    load_tokenizer(first).save_pretrained(second)
    Tokens(dataset, Example, load_tokenizer(second), process_seal(), lambda *_: pytest.fail("made again"))
    assert [p.stat() for p in files(dataset)] == [before]


def test_other_bytes_another_tokenizer_or_other_code_are_other_tokens(
    dataset: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tokens(dataset, Example, tokenizer, process_seal())
    Tokens(dataset, Example, train_tokenizer([*TEXTS * 3, "and more words"], 310), process_seal())
    assert len(files(dataset)) == 2
    changed = train_tokenizer(TEXTS * 3, 300)
    changed.chat_template = "!" + changed.chat_template
    Tokens(dataset, Example, changed, process_seal())
    assert len(files(dataset)) == 3
    (dataset.parent / "code.py").write_text("EDITED = 1")
    monkeypatch.setattr(module, "CODE", (*module.CODE, str(dataset.parent / "code.py")))
    Tokens(dataset, Example, tokenizer, process_seal())
    assert len(files(dataset)) == 4
    write_pairs(dataset, Example, EXAMPLES[:3])
    assert len(Tokens(dataset, Example, tokenizer, process_seal())) == 3
    assert len(files(dataset)) == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_tokens_are_made_again(
    damage: str, dataset: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Tokens(dataset, Example, tokenizer, process_seal())
    [path] = files(dataset)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    path.write_bytes({"flip": bytes(flipped), "cut": content[:-9], "empty": b""}[damage])
    tokens = Tokens(dataset, Example, tokenizer, process_seal())
    assert "has no valid seal of this run's key: it is made again" in caplog.text
    assert path.read_bytes() == content
    assert len(tokens) == 23


def test_files_of_a_killed_process_are_not_used(dataset: Path, tokenizer: Any) -> None:
    Tokens(dataset, Example, tokenizer, process_seal())
    [path] = files(dataset)
    building = path.with_name(f"{path.name}.building")
    building.mkdir()
    os.replace(path, building / path.name)
    (building / path.name).write_bytes(b"ARROW1")
    assert len(Tokens(dataset, Example, tokenizer, process_seal())) == 23
    assert files(dataset) == [path]
    assert not building.exists()


@pytest.mark.parametrize("plant", ["foreign seal", "seal of another file", "no seal", "pipe", "link"])
def test_planted_tokens_are_not_read(
    plant: str, dataset: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, intruder: Seal
) -> None:
    other = tmp_path / "other" / "p"
    other.parent.mkdir()
    write_pairs(other, Example, EXAMPLES[:3])
    Tokens(dataset, Example, tokenizer, process_seal())
    # The poison is whole, and sealed: by somebody else, or for another dataset.
    Tokens(other, Example, tokenizer, intruder if plant == "foreign seal" else process_seal())
    [path], [poison] = files(dataset), files(other)
    content, seal = path.read_bytes(), path.with_name(f"{path.name}.seal")
    path.unlink()
    if plant == "pipe":
        os.mkfifo(path)
    elif plant == "link":
        path.symlink_to(poison)
    else:
        path.write_bytes(poison.read_bytes())
        seal.write_bytes(poison.with_name(f"{poison.name}.seal").read_bytes())
        if plant == "foreign seal":
            intruder.seal_file(path)
        elif plant == "no seal":
            seal.unlink()
    assert len(Tokens(dataset, Example, tokenizer, process_seal())) == 23
    assert path.read_bytes() == content
    assert "it is made again" in caplog.text
