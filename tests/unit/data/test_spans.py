"""Spans of 13 words: found whatever case, marks and neighbours they have, and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from xray_runtime.data.spans import SPAN_WORDS, SpanSet, words_of

WORDS = [f"w{i}" for i in range(6)]


def test_case_marks_and_neighbours_do_not_hide_a_span() -> None:
    asked = "The quick brown fox jumps over the lazy dog while the other dogs look on."
    ours = SpanSet([asked])
    told = "He said:\n“the QUICK, brown fox; jumps over the lazy dog -- while the other dogs look on”, and left."
    assert len(ours.found_in([told]))
    assert len(words_of(asked)) == 15
    assert not len(ours.found_in([told.replace("lazy", "sleepy")]))


def test_twelve_words_are_no_span_unless_they_are_all_there_is() -> None:
    twelve = " ".join(f"word{i}" for i in range(12))
    ours = SpanSet([twelve, twelve + " and more of it"])
    assert not len(ours.found_in([twelve + " but otherwise"]))
    assert not len(ours.found_in([], [twelve + " but otherwise"]))
    assert len(ours.found_in([], [twelve.upper() + "?"]))


def test_a_span_does_not_reach_over_two_texts() -> None:
    words = [f"word{i}" for i in range(13)]
    ours = SpanSet([" ".join(words)])
    assert not len(ours.found_in([" ".join(words[:6]), " ".join(words[6:])]))


def test_texts_without_words_and_no_texts() -> None:
    assert not len(SpanSet([]).found_in(["a b c"], ["a"]))
    assert not len(SpanSet(["?!", ""]).found_in(["?!"], ["", "?!"]))


@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=40), max_size=4),
    st.lists(st.lists(st.sampled_from(WORDS), max_size=40), max_size=8),
)
def test_the_same_as_looking_for_every_run_of_words(asked: list[list[str]], told: list[list[str]]) -> None:
    ours = SpanSet(map(" ".join, asked))
    found = ours.found_in(map(" ".join, told), map(" ".join, told))
    runs = {tuple(t[i : i + SPAN_WORDS]) for t in told for i in range(len(t) - SPAN_WORDS + 1)}
    for words in asked:
        spans = {tuple(words[i : i + SPAN_WORDS]) for i in range(len(words) - SPAN_WORDS + 1)}
        expected = bool(spans & runs) if spans else bool(words) and words in told
        assert np.isin(ours.hashes(" ".join(words)), found).any() == expected
