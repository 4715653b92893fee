"""Golds of public kinds: each is read whole or refused, right replies score 1 and wrong ones 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.rewards.answers import read_gold
from xray_runtime.rewards.checks import math

LINES = Path(__file__).with_name("golds.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES if not line.startswith("#")]
READ, REFUSED = ([row for row in ROWS if len(row) == length] for length in (3, 2))
FORMS = (
    r"We add, so it is $\boxed{%s}$.",
    r"First $y = 99$. \[\boxed{%s}\] Done with step 3.",
    "There are 99 ways, minus 1.\nThe final answer is $%s$. I hope it is correct.",
    "**Answer:** %s",
    "We get 99.\n#### %s",
    "%s",
)


@pytest.mark.parametrize("row", READ, ids=lambda row: repr(row[0])[-60:])
def test_a_gold_and_its_replies(row: tuple[Any, list[str], list[str]]) -> None:
    gold, right, wrong = row
    found = {reply: math(reply, gold) for reply in _replies(right)}
    assert [reply for reply, score in found.items() if score != 1.0] == []
    found = {reply: math(reply, gold) for reply in _replies(wrong)}
    assert [reply for reply, score in found.items() if score != 0.0] == []


def _replies(answers: list[str]) -> list[str]:
    """Each answer in a box, and the answers in turn in the other forms."""
    # A form would put one formula's dollars into another's.
    forms = [[form for form in FORMS if "$" not in form or "$" not in text.replace(r"\$", "")] for text in answers]
    return [
        form % text
        for number, text in enumerate(answers)
        for form in {forms[number][0], forms[number][number % len(forms[number])]}
    ]


def test_there_are_two_hundred_golds() -> None:
    assert len({repr(row[0]) for row in READ}) >= 200


@pytest.mark.parametrize(("gold", "why"), REFUSED, ids=lambda value: repr(value)[:40])
def test_a_gold_that_is_not_read_whole_is_refused(gold: Any, why: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_gold(gold)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
