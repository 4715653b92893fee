"""No row is longer than the model's context: the limits that stages take, and what they leave out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.message_texts import Messages
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.pairs import HELDOUT, TRAIN, Example, PreferenceExample, write_pairs
from xray_runtime.data.replies import LabelledReply, Replies, mismatched, within
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.methods.common.findings import pairs_findings
from xray_runtime.methods.common.training.dataset import (
    check_longest,
    fitting_prompts,
    list_dropped,
    max_prompt_tokens,
    max_reply_tokens,
    preference_tokens,
)
from xray_runtime.methods.common.training.prompts import UniquePrompts
from xray_runtime.models.causal_lm import max_positions

ORIGINAL = {"original_max_position_embeddings": 32}


def model(directory: Path, **fields: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def dataset(directory: Path, limit: int | None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "dataset.json").write_text(json.dumps({"max_prompt_tokens": limit}))
    return directory


@pytest.mark.parametrize(
    ("given", "context", "reply", "limit"),
    [
        (None, 16_384, 512, 15_872),
        (None, 512, 170, 342),
        (None, None, 512, 1024),
        (8520, 512, 170, 342),
        (32, 512, 170, 32),
        (8520, None, 170, 8520),
    ],
)
def test_a_prompt_has_what_the_context_leaves(
    tmp_path: Path, given: int | None, context: int | None, reply: int, limit: int
) -> None:
    fields = {} if context is None else {"max_position_embeddings": context}
    assert max_prompt_tokens(dataset(tmp_path / "data", given), model(tmp_path / "m", **fields), reply) == limit


@pytest.mark.parametrize("given", [None, 8])
def test_replies_that_leave_no_prompt_are_refused(tmp_path: Path, given: int | None) -> None:
    with pytest.raises(
        ValueError, match=r"^replies of 600 tokens are not allowed: the model's context has 512 tokens$"
    ):
        max_prompt_tokens(dataset(tmp_path / "data", given), model(tmp_path / "m", n_positions=512), 600)


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        # YaRN names what it scales.
        ({"max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4.0} | ORIGINAL}, 128),
        ({"max_position_embeddings": 99, "rope_parameters": {"rope_type": "yarn", "factor": 2} | ORIGINAL}, 99),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}, 64),
    ],
)  # fmt: skip
def test_the_context_of_a_config(tmp_path: Path, fields: dict[str, Any], context: int) -> None:
    assert max_positions(model(tmp_path / "m", **fields)) == context
    assert max_reply_tokens(None, model(tmp_path / "m", **fields)) == min(512, context // 3)


def user(words: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hello " * words}]


def stage(name: str = "dpo") -> Any:
    return SimpleNamespace(name=name, seal=process_seal())


class Notes:
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def progress(self, *_: Any) -> None: ...

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.values |= values


def pairs(directory: Path, train: list[int], heldout: list[int]) -> Path:
    """Pairs whose chosen replies have so many words."""
    directory.mkdir()
    for side, sizes in ((TRAIN, train), (HELDOUT, heldout)):
        made = [PreferenceExample(f"p{n}", user(n + 1), "hello " * size, "hello") for n, size in enumerate(sizes)]
        write_pairs(directory / side, PreferenceExample, made)
    return directory


def test_pairs_beyond_the_context_are_left_out_and_counted(tmp_path: Path, tiny_tokenizer: Any) -> None:
    data, recorder = pairs(tmp_path / "data", [2, 90, 3, 90, 4], [90, 2]), Notes()
    small: Any = model(tmp_path / "m", max_position_embeddings=60)
    train, heldout = preference_tokens(stage(), data, tiny_tokenizer, tmp_path, recorder, small)  # type: ignore[arg-type]
    assert (train.rows.tolist(), heldout.rows.tolist()) == ([0, 2, 4], [1])
    assert recorder.values == {"lengths/too_long": 3.0, "lengths/max_tokens": 60.0}
    whole, _ = preference_tokens(stage(), data, tiny_tokenizer, tmp_path, Notes(), model(tmp_path / "big"))  # type: ignore[arg-type]
    for place, row in enumerate([0, 2, 4]):
        one, other = train.take([place]), whole.take([row])
        assert [getattr(one, name).values.tolist() for name in ("input_ids", "rejected_ids")] == [
            getattr(other, name).values.tolist() for name in ("input_ids", "rejected_ids")
        ]
        assert train.prompt(place) == whole.prompt(row)
    assert int(max(train.take(range(3)).input_ids.lengths)) <= 60
    assert [text.count("hello") for text in fitting_prompts(data, train)] == [1, 3, 5]
    series = {name: [(0, value)] for name, value in recorder.values.items()}
    assert pairs_findings(series) == ["dropped 3 pairs longer than the model's context of 60 tokens"]


def test_what_was_left_out_is_listed_with_its_tokens(tmp_path: Path, tiny_tokenizer: Any) -> None:
    data, small = pairs(tmp_path / "data", [2, 90, 3], [2, 80]), model(tmp_path / "m", max_position_embeddings=60)
    train, _ = preference_tokens(stage(), data, tiny_tokenizer, tmp_path, Notes(), small)  # type: ignore[arg-type]
    listed = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    whole, _ = preference_tokens(stage(), data, tiny_tokenizer, tmp_path, Notes(), model(tmp_path / "big"))  # type: ignore[arg-type]
    assert listed[0] == {"reason": "longer_than_context", "id": "p1", "tokens": len(whole.take([1]).input_ids.values)}
    assert [(row["id"], row["tokens"] > 60) for row in listed] == [("p1", True), ("p1", True)]
    list_dropped(tmp_path / "data", train)
    assert len((tmp_path / "data" / "dropped.jsonl").read_text().splitlines()) == 1
    list_dropped(tmp_path / "m", whole)
    assert not (tmp_path / "m" / "dropped.jsonl").exists()


def test_the_row_that_no_workhorse_holds_is_named(tmp_path: Path, tiny_tokenizer: Any, message_texts: Messages) -> None:
    """The longest of those that are left, with its place in the dataset."""
    data, small = pairs(tmp_path / "data", [2, 90, 20, 3], [2]), model(tmp_path / "m", max_position_embeddings=60)
    train, _ = preference_tokens(stage(), data, tiny_tokenizer, tmp_path, Notes(), small)  # type: ignore[arg-type]
    asked: list[int] = []
    one: Any = SimpleNamespace(name="dpo", too_long=lambda spec, tokens: asked.append(tokens) or "is too long: do this")
    pair = train.take([1])
    sides = [int(ids.lengths[0]) for ids in pair.sides()]
    for given in ({}, {"reply_tokens": 16, "field": "critic_engine"}):
        with message_texts.raises(ValueError):
            check_longest(one, None, train.together(), train.id, **given)  # type: ignore[arg-type]
    assert asked == [sum(sides) - int(pair.prompt_lengths[0]), sum(sides) - int(pair.prompt_lengths[0]) + 16]
    one.too_long = lambda spec, tokens: None
    check_longest(one, None, train.longest(), train.id)  # type: ignore[arg-type]


def test_a_side_without_a_pair_that_fits_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    data, small = pairs(tmp_path / "data", [2], [90]), model(tmp_path / "m", max_position_embeddings=60)
    with pytest.raises(ValueError, match=r"^dpo: no held-out pair fits the model's context of 60 tokens$"):
        preference_tokens(stage(), data, tiny_tokenizer, tmp_path, Notes(), small)  # type: ignore[arg-type]


def test_verdicts_beyond_the_context_are_left_out(tiny_tokenizer: Any) -> None:
    found = [LabelledReply(user(1), "hello " * size, True) for size in (1, 90, 2)]
    assert within(found, tiny_tokenizer, 60) == [found[0], found[2]]
    assert within(found, tiny_tokenizer, None) == found


def test_another_prompts_reply_is_cut_to_the_context() -> None:
    rows = TextBatch.of([[1] * 3, [2] * 18], [[7] * 17, [8] * 2])
    found = mismatched(Replies(2, rows.take), seed=0, max_tokens=20).take(np.arange(2))
    assert sorted(found.input_ids.lengths.tolist()) == [5, 20]


@pytest.mark.parametrize(
    ("words", "limit", "room"), [(3, 32_000, 1024), (3, 64, 64), (600, 32_000, 2048), (600, 1600, 1600)]
)
def test_a_generator_has_room_for_the_prompts_there_are(
    tmp_path: Path, tiny_tokenizer: Any, words: int, limit: int, room: int
) -> None:
    """A context of 32,000 would take a cache of 32,000 tokens for prompts of ten."""
    write_pairs(tmp_path / TRAIN, Example, [Example("a", "a", user(words), "fine")])
    found = UniquePrompts(tiny_tokenizer, tmp_path / TRAIN, limit, process_seal())
    assert found.room == room
