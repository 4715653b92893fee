"""Replies out of pairs and verdicts: which tokens each row has, and what is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.data.encoding import encode_replies
from xray_runtime.data.batch import PairBatch, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.replies import Replies, both_sides, encoded, from_verdicts, joined, mismatched
from xray_runtime.data.text_set import TextSet
from xray_runtime.data.tokenizing import encode_prompts

CHOSEN, REJECTED, LENGTHS = [[1, 2, 10], [3, 11, 12], [4, 5, 13]], [[1, 2, 20, 21], [3, 22], [4, 5, 23]], [2, 1, 2]


class Three:
    """Three pairs."""

    def __len__(self) -> int:
        return 3

    def take(self, rows: np.ndarray) -> TextBatch:
        sides = Ragged.of(CHOSEN), Ragged.of(REJECTED)
        return PairBatch(input_ids=sides[0], rejected_ids=sides[1], prompt_lengths=np.array(LENGTHS)).take(rows)


def read(replies: Replies, *numbers: int) -> list[tuple[list[int], int]]:
    rows = replies.take(np.array(numbers))
    assert set(rows.columns()) == {"input_ids", "prompt_lengths"}
    return [(ids.tolist(), int(n)) for ids, n in zip(rows.input_ids, rows.prompt_lengths, strict=True)]


def test_pairs_are_two_replies_each() -> None:
    replies = both_sides(Three())
    assert replies.size == 6
    assert read(replies, 0, 1, 2, 3, 4, 5) == [
        ([1, 2, 10], 2),
        ([1, 2, 20, 21], 2),
        ([3, 11, 12], 1),
        ([3, 22], 1),
        ([4, 5, 13], 2),
        ([4, 5, 23], 2),
    ]
    assert read(replies, 5, 0, 5) == [([4, 5, 23], 2), ([1, 2, 10], 2), ([4, 5, 23], 2)]
    assert both_sides(Three(), 2).size == 4
    assert both_sides(Three(), 9).size == 6


def test_sources_follow_one_another() -> None:
    one, other = both_sides(Three()), both_sides(Three(), 1)
    both = joined([one, other])
    assert both.size == 8
    assert read(both, 7, 2, 6, 5) == [*read(other, 1), *read(one, 2), *read(other, 0), *read(one, 5)]


def test_every_reply_stands_once_under_a_prompt_that_is_not_its_own() -> None:
    replies = both_sides(Three())
    rows = read(replies, *range(6))
    prompts, answers = [ids[:n] for ids, n in rows], [ids[n:] for ids, n in rows]
    found = read(mismatched(replies, seed=3), *range(6))
    assert [ids[:n] for ids, n in found] == prompts
    stand = [answers.index(ids[n:]) for ids, n in found]
    assert sorted(stand) == list(range(6))
    # One cycle through all of them, so that none meets itself.
    place, seen = 0, []
    for _ in range(6):
        place = stand[place]
        seen.append(place)
    assert sorted(seen) == list(range(6))
    # A row has the same partner in whatever batch it is.
    assert read(mismatched(replies, seed=3), 4, 1) == [found[4], found[1]]
    assert read(mismatched(replies, seed=4), *range(6)) != found


def verdict(number: int, verdict: str, a: str = "yes", b: str = "no") -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"question {number}"}], "a": a, "b": b, "verdict": verdict}


def test_verdicts_are_two_labelled_replies_each() -> None:
    records = [
        *(verdict(number, said) for number, said in enumerate(["a", "b", "tie", "bad", "skip", "a"])),
        verdict(6, "a", "same", "same"),
        verdict(7, "bad", "same", "same"),
    ]
    found, counts = from_verdicts(records, TextSet(["question 5"]))
    assert [(one.prompt[0]["content"][-1], one.reply, one.desirable) for one in found] == [
        *[("0", "yes", True), ("0", "no", False)],
        *[("1", "yes", False), ("1", "no", True)],
        *[("2", "yes", True), ("2", "no", True)],
        *[("3", "yes", False), ("3", "no", False)],
        *[("7", "same", False), ("7", "same", False)],
    ]
    assert counts == {"skipped": 1, "dropped_prompt_held_out": 1, "dropped_same": 1}


def test_verdicts_have_the_tokens_that_pairs_have(tiny_tokenizer: Any) -> None:
    found, _ = from_verdicts([verdict(0, "a", "hello", "how are you")], TextSet())
    [prompt] = encode_prompts(tiny_tokenizer, [found[0].prompt])
    replies = encode_replies(tiny_tokenizer, ["hello", "how are you"])
    assert read(encoded(found, tiny_tokenizer), 0, 1) == [(prompt + reply, len(prompt)) for reply in replies]


@pytest.mark.parametrize("size", [2, 3, 50])
def test_mismatches_of_few(size: int) -> None:
    ids = Ragged.of([[7, number] for number in range(size)])
    replies = Replies(size, TextBatch(input_ids=ids, prompt_lengths=np.ones(size, np.int64)).take)
    found = [row[0][1] for row in read(mismatched(replies, seed=0), *range(size))]
    assert sorted(found) == list(range(size))
    assert all(number != own for own, number in enumerate(found))
