"""Tokens of two vocabularies over one text: where both end, and log-probabilities by chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xray_runtime.data.aligned_tokens import Aligned, aligned
from xray_runtime.data.tokenizing import END, USER, train_tokenizer

WORDS = train_tokenizer(["hello there"] * 5, 300)
"""It has both words, the second with its space, as tokens."""
BYTES = train_tokenizer(["q"], 300)


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def of(text: str, own: Any = WORDS, other: Any = BYTES, num_ends: int = 1) -> Aligned:
    end = [WORDS.get_vocab()[END]] * num_ends
    found = aligned(own, ids(own, text) + end, other, ids(other, text) + end, num_ends=num_ends)
    assert found is not None
    return found


def test_a_chunk_ends_where_tokens_of_both_end() -> None:
    found = of("hello there")
    assert found.own_chunks.tolist() == [0, 1, 2]
    assert found.chunks.tolist() == [0] * 5 + [1] * 6 + [2]
    assert found.ids == ids(BYTES, f"hello there{END}")
    cut = of("hello there", num_ends=0)
    assert (cut.own_chunks.tolist(), cut.chunks.tolist()) == ([0, 1], [0] * 5 + [1] * 6)
    # Two bytes are one character, at whose first no text ends.
    assert of("ü", BYTES, BYTES).chunks.tolist() == [0, 0, 1]
    assert of("").chunks.tolist() == [0]


def test_the_difference_of_a_chunk_is_shared_by_its_tokens() -> None:
    one = of("hello there")
    of_bytes = np.array([-0.1] * 5 + [-0.2] * 6 + [-0.3], np.float32)
    found = one.spread(np.array([-1.0, -2.0, -0.5]), of_bytes)
    assert found.tolist() == pytest.approx([-0.5, -1.2, -0.3])
    # −1 is .5 more than 5 · −.3, and −2.4 is .6 less than 6 · −.3.
    back = of("hello there", BYTES, WORDS).spread(np.full(12, -0.3, np.float32), np.array([-1.0, -2.4, -0.7]))
    assert back.tolist() == pytest.approx([-0.2] * 5 + [-0.4] * 6 + [-0.7])
    assert back.dtype == np.float32


def test_a_teacher_that_is_the_student_is_not_a_bit_apart() -> None:
    """Of the same tokens, and of a chunk whose tokens sum to the same."""
    rng = np.random.default_rng(3)
    own = (-rng.random(12)).astype(np.float32)
    same = of("hello there", BYTES, BYTES).spread(own, own)
    np.testing.assert_array_equal(same, own)
    halves = np.array([-0.25] * 4 + [-1.0] + [-0.5] * 6 + [-0.75])
    words = np.array([-2.0, -3.0, -0.75])
    np.testing.assert_array_equal(of("hello there", BYTES, WORDS).spread(halves, words), halves)


@pytest.mark.parametrize("extra", [[WORDS.get_vocab()["Ã"]], [WORDS.get_vocab()[USER]]])
def test_what_is_not_the_same_text_is_not_aligned(extra: list[int]) -> None:
    """Half of a character; a token that marks a turn."""
    assert BYTES.get_vocab()[USER] == WORDS.get_vocab()[USER]
    text = ids(BYTES, "hello")
    assert aligned(BYTES, [*text, *extra], WORDS, ids(WORDS, "hello"), num_ends=0) is None
    assert aligned(BYTES, text, WORDS, ids(WORDS, "hello there"), num_ends=0) is None
    assert aligned(BYTES, [], WORDS, ids(WORDS, "hello"), num_ends=0) is None


def test_bytes_that_are_no_character_are_not_the_one_that_shows_them() -> None:
    whole = ids(BYTES, "hello there")
    broken = [*whole[:5], WORDS.get_vocab()["Ã"], *whole[5:]]
    text = BYTES.decode(broken)
    assert text == "hello\ufffd there"
    assert aligned(BYTES, broken, WORDS, ids(WORDS, text), num_ends=0) is None
